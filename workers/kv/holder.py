"""The process that holds one accelerator's shared memory: KV extents and weights of all its replicas.

Started by the agent as `python -P -m workers.kv.holder`, one for each accelerator, with a context on that
device and nothing else: no torch, no network, no secret. It hands memory to replicas as descriptors over a
Unix socket. Its end takes nothing away from a replica that has mapped its memory; a new holder serves
what is asked for from then on. It ends by itself when it has held nothing for a while.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

from workers.kv.cuda_driver import CudaDriver, CudaUnavailableError
from workers.kv.cuda_memory import CudaMemory
from workers.kv.held_extents import ExtentShelf
from workers.kv.held_weights import Handover, WeightsRefusedError, WeightsShelf
from workers.kv.holder_wire import (
    MOST_DESCRIPTORS,
    Answer,
    AskStatus,
    Done,
    GiveBack,
    Hello,
    Lend,
    Lent,
    OpenWeights,
    Refused,
    RejectWeights,
    Request,
    SealWeights,
    Status,
    Weights,
    close_all,
    receive_request,
    send,
    short_path,
)
from workers.kv.memory import HostMemory, Piece, SharedMemory

UNAVAILABLE_STATUS = 3
"""Exit status: this device's memory cannot be shared; the last line of the log says why."""
LINGER_SECONDS = 60.0
IDLE_SECONDS = 120.0
_TEND_SECONDS = 1.0
_SEND_SECONDS = 5.0
"""A replica that is stopped must not stop the others."""
_CREDENTIALS = struct.Struct("iII")
_PRIVATE_FOLDER = 0o700

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HolderTerms:
    """How a holder behaves."""

    accelerator: str
    """Name of the device in the inventory; part of every pool's layout."""
    linger_seconds: float = LINGER_SECONDS
    """How long weights outlive their last user, so that a replica that is built again finds them."""
    idle_seconds: float = IDLE_SECONDS
    """A holder that has held nothing for so long, and has no connection, ends."""


@dataclass(frozen=True, slots=True, eq=False)
class _Client:
    channel: socket.socket
    pid: int


class Holder:
    """Serves one socket with one thread."""

    def __init__(
        self,
        memory: SharedMemory,
        path: Path,
        pools: Path,
        terms: HolderTerms,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen at `path`, whoever did so before. Raises `OSError`."""
        self._memory = memory
        self._terms = terms
        self._clock = clock
        self._path = path
        self._extents = ExtentShelf(memory, self._new_piece, self._wipe, pools)
        self._weights = WeightsShelf(memory, self._new_piece, linger_seconds=terms.linger_seconds)
        self._clients: set[_Client] = set()
        self._idle_since = clock()
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(path)
        self._inode = path.stat().st_ino
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until stopped, or idle for long enough, or replaced by another holder."""
        tended_at = self._clock()
        while not self._stopping:
            for key, _ in self._selector.select(_TEND_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._clients:  # not dropped by an earlier event of this round
                    self._serve(key.data)
            now = self._clock()
            if now - tended_at >= _TEND_SECONDS:
                tended_at = now
                self._tend(now)

    def stop(self) -> None:
        """Let `run` return after the event in progress."""
        self._stopping = True

    def close(self) -> None:
        """Stop listening; what replicas have mapped stays theirs."""
        if self._is_current():
            self._path.unlink()
        for client in tuple(self._clients):
            client.channel.close()
        self._listener.close()
        self._selector.close()

    def _is_current(self) -> bool:
        try:
            return self._path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    # -- connections -----------------------------------------------------------------------------
    def _accept(self) -> None:
        channel, _ = self._listener.accept()
        pid, uid, _gid = _CREDENTIALS.unpack(
            channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.getuid():
            log.warning("process %d of user %d was turned away", pid, uid)
            channel.close()
            return
        channel.settimeout(_SEND_SECONDS)
        client = _Client(channel, pid)
        self._clients.add(client)
        self._selector.register(channel, selectors.EVENT_READ, client)
        memory = self._memory
        self._say(
            client,
            Hello(self._terms.accelerator, memory.kind, memory.page_bytes, memory.device_uuid, os.getpid()),
        )

    def _serve(self, client: _Client) -> None:
        try:
            request = receive_request(client.channel)
        except OSError as error:
            log.warning("process %d: %s", client.pid, error)
            request = None
        if request is None:
            self._drop(client)
            return
        try:
            self._answer(client, request)
        except WeightsRefusedError as error:
            self._say(client, Refused(str(error), errno.EINVAL))
        except OSError as error:
            log.warning("process %d: %s: %s", client.pid, type(request).__name__, error)
            self._say(client, Refused(error.strerror or str(error), error.errno or errno.EIO))

    def _drop(self, client: _Client) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._selector.unregister(client.channel)
        client.channel.close()
        self._hand_over(self._weights.leave(client, now=self._clock()))

    def _say(self, client: _Client, answer: Answer, pieces: Sequence[Piece] = ()) -> None:
        """Answer; a client that cannot be answered is dropped."""
        descriptors: list[int] = []
        try:
            for piece in pieces:
                descriptors.append(self._memory.export(piece))  # noqa: PERF401 - those made so far are closed
            send(client.channel, answer, descriptors)
        except OSError as error:
            log.warning("process %d cannot be answered: %s", client.pid, error)
            self._drop(client)
        finally:
            close_all(descriptors)

    # -- requests --------------------------------------------------------------------------------
    def _answer(self, client: _Client, request: Request) -> None:
        match request:
            case Lend():
                self._lend(client, request)
            case GiveBack():
                self._extents.give_back(request.pool_id, request.extents, client.pid)
                self._say(client, Done())
            case OpenWeights():
                handover = self._weights.open(client, request.name, request.size_bytes)
                self._hand_over([handover] if handover else [])
            case SealWeights():
                handovers = self._weights.seal(client, request.name, request.checksum)
                self._say(client, Done())
                self._hand_over(handovers)
            case RejectWeights():
                self._weights.reject(client, request.name)
                self._say(client, Done())
            case AskStatus():
                self._say(client, self.status())
            case _:
                assert_never(request)

    def _lend(self, client: _Client, request: Lend) -> None:
        if len(request.extents) > MOST_DESCRIPTORS:
            raise OSError(errno.E2BIG, f"at most {MOST_DESCRIPTORS} extents can be asked for at once")
        self._say(client, Lent(), self._extents.lend(request.pool_id, request.extents, client.pid))

    def _hand_over(self, handovers: Sequence[Handover]) -> None:
        for handover in handovers:
            client = handover.user
            if not isinstance(client, _Client):
                raise TypeError("users of weights are clients")
            if handover.piece is None:
                self._say(client, Refused("there is no memory for these weights", errno.ENOMEM))
                continue
            state: Literal["fill", "ready"] = "ready" if handover.checksum else "fill"
            size_bytes = handover.piece.size_bytes
            self._say(client, Weights(state, size_bytes, handover.checksum), [handover.piece])

    def status(self) -> Status:
        """Return what is held."""
        extents = self._extents
        return Status(extents.lent_extents, extents.lent_bytes, len(self._clients), self._weights.status())

    # -- memory ----------------------------------------------------------------------------------
    def _new_piece(self, size_bytes: int) -> Piece:
        """Allocate and wipe: device memory comes as whoever had it before left it."""
        page = self._memory.page_bytes
        size = -(-size_bytes // page) * page
        try:
            piece = self._memory.allocate(size)
        except OSError as error:
            if error.errno != errno.ENOMEM or not (self._extents.tend() | self._weights.make_room()):
                raise
            piece = self._memory.allocate(size)
        try:
            self._wipe(piece)
        except OSError:
            self._memory.release(piece)
            raise
        return piece

    def _wipe(self, piece: Piece) -> None:
        address = self._memory.reserve(piece.size_bytes)
        try:
            self._memory.map(address, piece, writable=True)
            try:
                self._memory.wipe(address, piece.size_bytes)
            finally:
                self._memory.unmap(address, piece.size_bytes)
        finally:
            self._memory.unreserve(address, piece.size_bytes)

    def _tend(self, now: float) -> None:
        self._extents.tend()
        self._weights.tend(now=now)
        if self._clients or self._extents.lent_extents or len(self._weights):
            self._idle_since = now
        elif now - self._idle_since >= self._terms.idle_seconds or not self._is_current():
            log.info("nothing is held any more")
            self.stop()


def _listen(path: Path) -> socket.socket:
    """Listen at a path, in place of whoever did; the socket appears whole."""
    path.parent.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with short_path(draft) as address:
            listener.bind(address)
        listener.listen()
        draft.replace(path)
    except OSError:
        listener.close()
        raise
    return listener


def open_memory(kind: str, limit_bytes: int | None = None) -> SharedMemory:
    """Open the host's memory or the first visible CUDA device's. Raises `CudaUnavailableError`, `OSError`."""
    return HostMemory(limit_bytes=limit_bytes) if kind == "host" else CudaMemory(CudaDriver())


def main(
    arguments: Sequence[str], open_memory: Callable[[str, int | None], SharedMemory] = open_memory
) -> int:
    """Serve until there is nothing to hold. Returns 0, or `UNAVAILABLE_STATUS`."""
    parser = argparse.ArgumentParser(prog="holder", description=__doc__)
    parser.add_argument("--memory", choices=("cuda", "host"), required=True)
    parser.add_argument("--accelerator", required=True, help="name of the device in the inventory")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--pools", type=Path, required=True, help="folder of the node's KV pools")
    parser.add_argument("--linger-seconds", type=float, default=LINGER_SECONDS)
    parser.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS)
    parser.add_argument("--limit-bytes", type=int, help="of the host's memory")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    terms = HolderTerms(options.accelerator, options.linger_seconds, options.idle_seconds)
    try:
        memory = open_memory(options.memory, options.limit_bytes)
    except CudaUnavailableError as error:
        log.error("memory of %s cannot be shared: %s", options.accelerator, error)  # noqa: TRY400 - said whole
        return UNAVAILABLE_STATUS
    holder = Holder(memory, options.socket, options.pools, terms)
    signal.signal(signal.SIGTERM, lambda *_: holder.stop())
    log.info("holds memory of %s (%s) at %s", terms.accelerator, memory.kind, options.socket)
    try:
        holder.run()
    finally:
        holder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
