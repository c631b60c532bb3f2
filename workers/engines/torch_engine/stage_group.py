"""What stages send one another tensors by: gloo, over connections that have proved whose they are."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_FOREVER = timedelta(days=365)
_ORDER, _ANSWER, _NONCE, _PROOF = range(1, 5)
"""Tags, so that nothing is taken for something else."""


_MEET_SECONDS = 60.0
"""Within which stages that have told their addresses are connected."""


class StageGroupError(RuntimeError):
    """Another stage cannot be reached any more, or is none of ours; the message says which."""


class _Gloo(Protocol):
    """What is used of gloo."""

    def send(self, tensors: list[Tensor], other: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], other: int, tag: int) -> Work: ...


class BoardStore(Store):
    """Lets gloo exchange its addresses over connections that are proven already."""

    def __init__(self, put: Callable[[str, bytes], None], get: Callable[[str], bytes]) -> None:
        """Put on, and wait for, what all stages see."""
        super().__init__()
        self._put = put
        self._get = get

    def set(self, key: str, value: bytes | str) -> None:
        """Tell all stages."""
        self._put(f"gloo/{key}", value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        """Wait for what a stage tells."""
        return self._get(f"gloo/{key}")

    def wait(self, keys: list[str], _timeout: timedelta | None = None) -> None:
        """Wait for all of these."""
        for key in keys:
            self.get(key)


class Coming:
    """A tensor on its way to or from another stage."""

    def __init__(self, work: Work, other: int, own: int) -> None:
        """Wait for `work` of stage `own` with another."""
        self._work = work
        self._other = other
        self._own = own

    def wait(self, *, seconds: float | None) -> None:
        """Wait for at most so long (`None`: for ever). Raises `StageGroupError`; nothing comes after that."""
        try:
            self._work.wait(_FOREVER if seconds is None else timedelta(seconds=seconds))
        except RuntimeError as error:
            text = f"stage {self._other} does not answer stage {self._own}: {error}"
            raise StageGroupError(text) from error


class StageGroup:
    """Sends to the next stage, receives from the one before; the last one's next is the first."""

    def __init__(self, store: Store, number: int, count: int, *, host: str, key: bytes) -> None:
        """Connect to all other stages from `host`, and have the neighbours prove that they know `key`.

        Raises `StageGroupError`.
        """
        self._number = number
        self._next, self._before = (number + 1) % count, (number - 1) % count
        try:
            self._gloo = _connect(store, number, count, host)
            for other in sorted({self._next, self._before}):
                self._check(other, key)
        except RuntimeError as error:
            raise StageGroupError(f"stage {number} of {count} has not met the others: {error}") from error

    def send(self, tensor: Tensor, *, seconds: float) -> None:
        """Send to the next stage. Raises `StageGroupError`."""
        tag = _ANSWER if self._next == 0 else _ORDER
        Coming(self._gloo.send([tensor], self._next, tag), self._next, self._number).wait(seconds=seconds)

    def receive(self, into: Tensor, *, seconds: float | None) -> None:
        """Receive from the stage before, waiting for at most so long (`None`: for ever). As above."""
        self.expect(into).wait(seconds=seconds)

    def expect(self, into: Tensor) -> Coming:
        """Be ready to receive from the stage before; what comes first is for what was expected first."""
        tag = _ANSWER if self._number == 0 else _ORDER
        return Coming(self._gloo.recv([into], self._before, tag), self._before, self._number)

    def _check(self, other: int, key: bytes) -> None:
        """Prove to a neighbour that the key is known here, and have it prove the same."""
        own, theirs = _bytes(secrets.token_bytes(_NONCE_BYTES)), _bytes(bytes(_NONCE_BYTES))
        self._swap(other, _NONCE, own, theirs)
        proof = _bytes(_proof(key, self._number, other, (_content(own), _content(theirs))))
        told = _bytes(bytes(_PROOF_BYTES))
        self._swap(other, _PROOF, proof, told)
        expected = _proof(key, other, self._number, (_content(theirs), _content(own)))
        if not hmac.compare_digest(_content(told), expected):
            raise StageGroupError(f"what answers as stage {other} does not know the key of this replica")

    def _swap(self, other: int, tag: int, out: Tensor, into: Tensor) -> None:
        sent, received = self._gloo.send([out], other, tag), self._gloo.recv([into], other, tag)
        for work in (sent, received):
            work.wait(timedelta(seconds=_MEET_SECONDS))


def _connect(store: Store, number: int, count: int, host: str) -> _Gloo:
    """Meet the others. The stubs of torch lack what is used here, which `torch.distributed` itself uses."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - the only way to say which address it binds to
    options._devices = [gloo.create_device(hostname=host)]  # noqa: SLF001 - as above
    options._timeout = timedelta(seconds=_MEET_SECONDS)  # noqa: SLF001 - as above
    return cast("_Gloo", gloo(store, number, count, options))


def _proof(key: bytes, prover: int, other: int, nonces: tuple[bytes, bytes]) -> bytes:
    said = b"".join((b"stage tensors", bytes((prover % 256, other % 256)), *nonces))
    return hmac.digest(key, said, hashlib.sha256)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _content(tensor: Tensor) -> bytes:
    return bytes(tensor.numpy())
