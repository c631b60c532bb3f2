"""Who may pull: requests are signed with a key of the swarm, which only its members were told.

Keys come from the control plane in sealed commands and hold for a while on the receiver's own clock, so
nodes need not agree on the time. A request is signed for one parent, one path and one body, and is taken
once. What has no valid signature gets nothing, not even whether the swarm exists.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

KEY_BYTES = 32
SCHEME = "Exaops-Swarm"
_NONCES = 8192
_FORM = re.compile(
    rf"{SCHEME} epoch=(?P<epoch>\d{{1,15}}), node=(?P<node>[\w.:-]{{1,80}}),"
    r" nonce=(?P<nonce>[0-9a-f]{32}), mac=(?P<mac>[0-9a-f]{64})"
)


class NotAllowedError(Exception):
    """A request that shows no valid signature."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a signature covers."""

    method: str
    path: str
    body: bytes


class KeyRing:
    """The keys of one swarm that this node was told, by epoch."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: dict[int, tuple[bytes, float]] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()

    def put(self, epoch: int, key: bytes, valid_seconds: float) -> None:
        """Hold a key for so long; saying it again lengthens its time. Raises `ValueError` for a bad one."""
        if len(key) != KEY_BYTES or valid_seconds <= 0:
            raise ValueError(f"a swarm's key has {KEY_BYTES} bytes and some time to hold")
        with self._lock:
            now = self._clock()
            self._keys = {e: held for e, held in self._keys.items() if held[1] > now}
            self._keys[epoch] = (key, now + valid_seconds)

    def sign(self, asked: Asked, *, child: str, parent: str) -> str:
        """Return the `Authorization` of a request to a parent. Raises `NotAllowedError` without a key."""
        with self._lock:
            now = self._clock()
            live = {epoch: key for epoch, (key, until) in self._keys.items() if until > now}
        if not live:
            raise NotAllowedError("this node holds no valid key of the swarm; its control plane gives one")
        epoch = max(live)
        nonce = secrets.token_hex(16)
        mac = _mac(live[epoch], asked, f"{epoch}\n{child}\n{parent}\n{nonce}")
        return f"{SCHEME} epoch={epoch}, node={child}, nonce={nonce}, mac={mac}"

    def check(self, authorization: str, asked: Asked, *, parent: str) -> str:
        """Return which node asked. Raises `NotAllowedError`."""
        form = _FORM.fullmatch(authorization)
        if form is None:
            raise NotAllowedError("no signature of a swarm")
        epoch, nonce = int(form["epoch"]), form["nonce"]
        with self._lock:
            key, until = self._keys.get(epoch, (b"", 0.0))
            if until <= self._clock():
                raise NotAllowedError("signed with a key that does not hold here")
            expected = _mac(key, asked, f"{epoch}\n{form['node']}\n{parent}\n{nonce}")
            if not hmac.compare_digest(expected, form["mac"]):
                raise NotAllowedError("the signature does not fit")
            if nonce in self._seen:
                raise NotAllowedError("this request was made before")
            self._seen[nonce] = None
            if len(self._seen) > _NONCES:
                self._seen.popitem(last=False)
        return form["node"]


def _mac(key: bytes, asked: Asked, ends: str) -> str:
    text = f"{asked.method}\n{asked.path}\n{ends}\n{sha256(asked.body).hexdigest()}"
    return hmac.new(key, text.encode(), sha256).hexdigest()
