"""The giving end: streams verified pieces to nodes that show a key of the swarm.

A thread for each connection: it sleeps in the kernel while the network is slow, and `sendfile` moves the
bytes. Nothing is sent that this node has not verified, and nobody gets anything without a signature.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from workers.weights.swarm import passes, wire
from workers.weights.swarm.board import PieceBoard
from workers.weights.swarm.pieces import PieceRow, from_map
from workers.weights.swarm.rates import SLICE_BYTES, RateCap, RateMeter

_BACKLOG = 128
_IDLE_SECONDS = 1.0
_OPEN_FILES = 4
_MICRO = 1e6
_OK, _BAD, _FORBIDDEN, _BUSY = 200, 400, 403, 503
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_REASONS = {_BAD: "Bad Request", _FORBIDDEN: "Forbidden", _BUSY: "Service Unavailable"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """What this node gives at most."""

    streams: int = 12
    """At once; one more is told to come again, which is no fault of either side."""
    connections: int = 64
    bytes_per_second: float = 0.0
    """Of the node. 0: as much as its link carries."""
    stream_bytes_per_second: float = 0.0
    stall_seconds: float = 8.0
    """A child that takes nothing in for so long is let go."""
    keep_seconds: float = 60.0
    """A kept connection without a request."""


@dataclass(frozen=True, slots=True)
class Share:
    """One revision, as it is given to others."""

    row: PieceRow
    board: PieceBoard
    keys: passes.KeyRing
    open_file: Callable[[str], int]
    """Descriptor of a file of the revision, for reading; the caller closes it. Raises `OSError`."""


@dataclass(slots=True)
class Stream:
    """What goes to one child now."""

    name: str
    """Of the manifest."""
    child: str
    wanted: bytearray
    left: int
    meter: RateMeter = field(default_factory=RateMeter)
    capped: RateMeter = field(default_factory=RateMeter)
    """Microseconds that it waited for this node's own caps, over the last few seconds."""

    @property
    def capped_ratio(self) -> float:
        """Share of the last few seconds in which this node's own caps held it back."""
        return min(1.0, self.capped.rate() / _MICRO)


class PieceServer:
    """Listens on one address of the cluster and never on all."""

    def __init__(
        self, node_id: str, address: str, *, port: int = 0, limits: ServeLimits | None = None
    ) -> None:
        """Bind. Raises `ValueError` for an address that is every address, and `OSError`."""
        if address in ("", "0.0.0.0", "::", "*"):  # noqa: S104 - it is refused here
            raise ValueError("pieces are served on an address of the cluster's network, not on all of them")
        self.node_id = node_id
        self.limits = limits or ServeLimits()
        self.cap = RateCap(self.limits.bytes_per_second)
        self.sent = RateMeter()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._shares: dict[str, Share] = {}
        self._lock = threading.Lock()
        self._connections: set[wire.Connection] = set()
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="pieces", daemon=True)

    def start(self) -> None:
        """Begin to take connections."""
        self._thread.start()

    def stop(self) -> None:
        """Close everything, and wait for the listening thread."""
        self._stop.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                connection.shut()
            shares = list(self._shares.values())
        for share in shares:
            share.board.close()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def share(self, name: str, share: Share) -> None:
        """Give this revision to whoever holds its keys."""
        with self._lock:
            self._shares[name] = share

    def unshare(self, name: str) -> None:
        """Give no more of it: its streams end."""
        with self._lock:
            share = self._shares.pop(name, None)
        if share is not None:
            share.board.close()

    def streams(self) -> list[Stream]:
        """Return what goes out now."""
        with self._lock:
            return list(self._streams.values())

    # -- connections -----------------------------------------------------------------------------
    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._stop.is_set():
                    return
                logger.warning("event=piece_connection_not_taken", exc_info=True)
                continue
            connection = wire.Connection(sock)
            with self._lock:
                full = len(self._connections) >= self.limits.connections
                if not full:
                    self._connections.add(connection)
            if full:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="piece", daemon=True).start()

    def _serve(self, connection: wire.Connection) -> None:
        try:
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.set_timeouts(connection.sock, self.limits.keep_seconds)
            while not self._stop.is_set() and self._answer(connection):
                pass
        except wire.WireError as error:
            logger.debug("event=piece_connection_ended error=%s", error)
        except Exception:  # top of the thread
            logger.exception("event=piece_connection_failed")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: wire.Connection) -> bool:
        """Answer one request. Returns whether the connection may carry another."""
        head = connection.read_request()
        if head is None:
            return False
        share = self._shares.get(_name_in(head.path))
        length = head.content_length
        # Without a share nothing is known of the body's size; it is not read at all.
        if share is None or length != share.row.map_bytes or head.method != "POST":
            _refuse(connection, _FORBIDDEN, "not allowed")
            return False
        body = connection.read_exactly(length)
        asked = passes.Asked(head.method, head.path, body)
        try:
            child = share.keys.check(head.headers.get("authorization", ""), asked, parent=self.node_id)
        except passes.NotAllowedError as error:
            logger.warning("event=piece_request_refused reason=%s", error)
            _refuse(connection, _FORBIDDEN, "not allowed")
            return False
        stream = self._open_stream(_name_in(head.path), child, share, body)
        if stream is None:
            _refuse(connection, _BUSY, "all streams are taken")
            return True
        return self._run_stream(connection, share, stream)

    def _open_stream(self, name: str, child: str, share: Share, body: bytes) -> tuple[int, Stream] | None:
        wanted = bytearray(share.row.count)
        left = 0
        for index in from_map(body, share.row.count):
            wanted[index] = 1
            left += 1
        with self._lock:
            if len(self._streams) >= self.limits.streams:
                return None
            number = next(self._numbers)
            self._streams[number] = Stream(name, child, wanted, left)
            return number, self._streams[number]

    def _run_stream(self, connection: wire.Connection, share: Share, opened: tuple[int, Stream]) -> bool:
        number, stream = opened
        sender = _Sender(connection, share, stream, (self.cap, RateCap(self.limits.stream_bytes_per_second)))
        try:
            wire.set_timeouts(connection.sock, self.limits.stall_seconds)
            connection.send(_STREAM_HEAD)
            ended = sender.run(self.sent)
            wire.set_timeouts(connection.sock, self.limits.keep_seconds)
        except OSError as error:
            # A file that is gone or short: the child hears that the stream broke, and asks another.
            logger.warning("event=piece_not_read manifest=%s error=%s", stream.name, error)
            return False
        else:
            return ended
        finally:
            sender.close()
            with self._lock:
                del self._streams[number]


class _Sender:
    """Sends one child what it wants, in the order in which it gets here."""

    def __init__(
        self, connection: wire.Connection, share: Share, stream: Stream, caps: tuple[RateCap, ...]
    ) -> None:
        self._connection = connection
        self._share = share
        self._stream = stream
        self._caps = [cap for cap in caps if cap.caps] or []
        self._files: OrderedDict[str, int] = OrderedDict()

    def run(self, sent: RateMeter) -> bool:
        """Send until all that was wanted is sent. Returns `False` if the board was closed before."""
        cursor, stream, board = 0, self._stream, self._share.board
        while stream.left:
            fresh, cursor = board.since(cursor, _IDLE_SECONDS)
            due = [index for index in fresh if stream.wanted[index]]
            if not due:
                if board.closed:
                    return False
                self._connection.send(wire.IDLE_FRAME)
            for index in due:
                length = self._send(index)
                stream.left -= 1
                stream.meter.add(length)
                sent.add(length)
        self._connection.send(wire.LAST_CHUNK)
        return True

    def close(self) -> None:
        """Close the files that were read."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _send(self, index: int) -> int:
        piece = self._share.row.piece(index)
        file = self._file(piece.path)
        self._connection.send(wire.frame_head(index, piece.length))
        offset, end = piece.offset, piece.offset + piece.length
        while offset < end:
            count = min(end - offset, SLICE_BYTES) if self._caps else end - offset
            for cap in self._caps:
                self._stream.capped.add(int(cap.take(count) * _MICRO))
            offset += self._sendfile(file, offset, count)
        self._connection.send(wire.CHUNK_END)
        return piece.length

    def _sendfile(self, file: int, offset: int, count: int) -> int:
        try:
            moved = os.sendfile(self._connection.sock.fileno(), file, offset, count)
        except BlockingIOError as error:
            raise wire.WireError("the child took nothing in for too long") from error
        except (BrokenPipeError, ConnectionResetError) as error:
            raise wire.PeerGoneError(f"the child is gone: {error}") from error
        if moved == 0:
            raise OSError("a file is shorter than its manifest says")
        return moved

    def _file(self, path: str) -> int:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = self._share.open_file(path)
            if len(self._files) > _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        return file


def _name_in(path: str) -> str:
    """Name of the manifest that a path asks for; empty for another path."""
    parts = path.split("/")
    return parts[2] if len(parts) == 4 and parts[1] == "weights" and parts[3] == "pieces" else ""  # noqa: PLR2004


def _refuse(connection: wire.Connection, status: int, text: str) -> None:
    body = text.encode()
    retry = "Retry-After: 1\r\n" if status == _BUSY else ""
    close = "" if status == _BUSY else "Connection: close\r\n"
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\n{retry}{close}Content-Length: {len(body)}\r\n\r\n"
    connection.send(head.encode() + body)
