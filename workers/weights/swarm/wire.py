"""The wire between parent and child: plain HTTP/1.1, one request for many pieces.

`POST /weights/<manifest>/pieces` with a map of the pieces that are wanted, one bit each. The answer is
chunked; each chunk is one frame: four bytes with a piece's number, little-endian, and its bytes. A frame of
`IDLE` alone, once a second, says that the parent lives and has nothing new. The last chunk comes when
everything that was wanted has been sent; then the connection can be asked again.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field

import httptools

IDLE = 0xFFFFFFFF
INDEX = struct.Struct("<I")
HEAD_LIMIT_BYTES = 8 * 1024
CHUNK_END = b"\r\n"
LAST_CHUNK = b"0\r\n\r\n"
_READ_BYTES = 64 * 1024
_CHUNK_LINE_BYTES = 18


class WireError(Exception):
    """What came is not what this wire carries, or it came too slowly; the text says what."""


class PeerGoneError(WireError):
    """The other end closed the connection."""


def path_of(name: str) -> str:
    """Path that pieces are asked at, by the name of their manifest."""
    return f"/weights/{name}/pieces"


def frame_head(index: int, length: int) -> bytes:
    """Return what goes before a piece's bytes."""
    return f"{INDEX.size + length:x}\r\n".encode() + INDEX.pack(index)


IDLE_FRAME = frame_head(IDLE, 0) + CHUNK_END


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Bound each read and write in the kernel: threads then block there, without polling."""
    value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


@dataclass(slots=True)
class Head:
    """Start line and headers of a message."""

    method: str = ""
    path: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content_length(self) -> int:
        """Bytes of the body. Raises `WireError` unless it says."""
        text = self.headers.get("content-length", "")
        if not text.isascii() or not text.isdigit() or len(text) > 12:  # noqa: PLR2004 - a terabyte
            raise WireError("the message does not say how long its body is")
        return int(text)


class _HeadReader:
    """Callbacks of httptools for a head alone."""

    def __init__(self) -> None:
        self.head = Head()
        self.done = False

    def on_url(self, url: bytes) -> None:
        self.head.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        if key in self.head.headers:
            raise WireError(f"the header {key} comes twice")
        self.head.headers[key] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.done = True


class Connection:
    """Reads of a socket with a little buffer; large reads go straight into the caller's memory."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()

    def close(self) -> None:
        """End it for both sides; a thread that reads or writes it wakes."""
        self.shut()
        self.sock.close()

    def shut(self) -> None:
        """Wake the thread that uses it, which then closes it."""
        with suppress(OSError):  # it may not be connected any more
            self.sock.shutdown(socket.SHUT_RDWR)

    def send(self, data: bytes) -> None:
        """Send all. Raises `WireError`."""
        try:
            self.sock.sendall(data)
        except BlockingIOError as error:
            raise WireError("the other end took nothing in for too long") from error
        except OSError as error:
            raise PeerGoneError(f"the connection broke: {error}") from error

    def read_request(self) -> Head | None:
        """Return the head of a request; nothing where the other end closed between two."""
        reader = _HeadReader()
        parser = httptools.HttpRequestParser(reader)
        if not self._feed(parser, reader):
            return None
        reader.head.method = parser.get_method().decode("latin-1")
        return reader.head

    def read_response(self) -> Head:
        """Return the head of a response. Raises `PeerGoneError` where none comes."""
        reader = _HeadReader()
        parser = httptools.HttpResponseParser(reader)
        if not self._feed(parser, reader):
            raise PeerGoneError("the connection was closed instead of an answer")
        reader.head.status = parser.get_status_code()
        return reader.head

    def _feed(
        self, parser: httptools.HttpRequestParser | httptools.HttpResponseParser, reader: _HeadReader
    ) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        while end < 0:
            if len(self._buffer) > HEAD_LIMIT_BYTES:
                raise WireError(f"a head of over {HEAD_LIMIT_BYTES} bytes")
            if not self._fill():
                if self._buffer:
                    raise PeerGoneError("the connection was closed inside a head")
                return False
            end = self._buffer.find(b"\r\n\r\n")
        head = bytes(self._buffer[: end + 4])
        del self._buffer[: end + 4]
        try:
            parser.feed_data(head)
        except httptools.HttpParserUpgrade as error:
            raise WireError("an upgrade, which nobody offered") from error
        except httptools.HttpParserError as error:
            cause = error.__context__
            raise WireError(str(cause) if isinstance(cause, WireError) else f"no HTTP: {error}") from error
        if not reader.done:
            raise WireError("no HTTP: the head does not end where it says")
        return True

    def read_exactly(self, count: int) -> bytes:
        """Return the next bytes."""
        data = bytearray(count)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, memory: memoryview) -> None:
        """Fill this memory. Raises `WireError` if the other end closes, or nothing comes for too long."""
        filled = min(len(self._buffer), len(memory))
        memory[:filled] = self._buffer[:filled]
        del self._buffer[:filled]
        while filled < len(memory):
            filled += self._receive(memory[filled:], socket.MSG_WAITALL)

    def read_chunk_size(self) -> int:
        """Size of the next chunk; 0 for the last one."""
        end = self._buffer.find(b"\r\n")
        while end < 0:
            if len(self._buffer) > _CHUNK_LINE_BYTES:
                raise WireError("no chunk where one should begin")
            if not self._fill():
                raise PeerGoneError("the connection was closed between pieces")
            end = self._buffer.find(b"\r\n")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        try:
            return int(line, 16)
        except ValueError as error:
            raise WireError("no chunk where one should begin") from error

    def read_chunk_end(self) -> None:
        """Pass over what ends a chunk."""
        if self.read_exactly(2) != CHUNK_END:
            raise WireError("a chunk is longer than it says")

    def _fill(self) -> bool:
        memory = bytearray(_READ_BYTES)
        try:
            count = self._receive(memoryview(memory), 0)
        except PeerGoneError:
            return False
        self._buffer += memory[:count]
        return True

    def _receive(self, memory: memoryview, flags: int) -> int:
        try:
            count = self.sock.recv_into(memory, len(memory), flags)
        except BlockingIOError as error:
            raise WireError("nothing came for too long") from error
        except OSError as error:
            raise PeerGoneError(f"the connection broke: {error}") from error
        if count == 0:
            raise PeerGoneError("the other end closed the connection")
        return count
