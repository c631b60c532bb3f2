"""How an engine's answer is cut: how much of what was read may pass, and when it is complete.

Bytes pass as they came; nothing is taken apart and put together again. A frame only knows where it
stands, so that an answer's end, or an event that must be added to it, lands between two chunks.
"""

from __future__ import annotations

import re
from typing import Protocol

_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?")
_LONGEST_LINE_BYTES = 256
_LONGEST_TRAILER_BYTES = 8 * 1024
LONGEST_HELD_CHUNK_BYTES = 1024 * 1024
_LINE_END = b"\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_MOST_SIZES = 4096
_KNOWN_SIZES: dict[bytes, int] = {}
"""Size lines that were read by the rules before. A stream's events are mostly alike in size."""


class FramingError(Exception):
    """The engine's answer breaks the rules of HTTP."""


class Frame(Protocol):
    """State of one answer's body."""

    complete: bool
    """All of the body has been fed."""
    payload: bytes
    """Body bytes, without framing, in what the last `feed` let pass."""

    def header(self) -> bytes:
        """Header line that announces this framing to the client."""

    def feed(self, data: bytes) -> bytes:
        """Take what was read, return what the client gets now. Raises `FramingError`."""

    def eof(self) -> None:
        """The engine closed: `complete` says afterwards whether that was the proper end."""

    def end(self) -> bytes:
        """Bytes that end a complete body for the client."""

    def append(self, payload: bytes) -> bytes | None:
        """Frame something of ours and the end after it, or `None` if the framing has no room."""


class LengthFrame:
    """A body of announced length."""

    __slots__ = ("_left", "_total", "complete", "payload")

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._left = total_bytes
        self.complete = total_bytes == 0
        self.payload = b""

    def header(self) -> bytes:
        return b"content-length: %d\r\n" % self._total

    def feed(self, data: bytes) -> bytes:
        if len(data) > self._left:
            raise FramingError("more bytes than announced")
        self._left -= len(data)
        self.complete = self._left == 0
        self.payload = data
        return data

    def eof(self) -> None:
        """An early end leaves the body incomplete."""

    def end(self) -> bytes:
        return b""

    def append(self, payload: bytes) -> bytes | None:  # noqa: ARG002 - the port's signature
        return None


class CloseFrame:
    """A body that ends with the connection; the client gets it in chunks."""

    __slots__ = ("complete", "payload")

    def __init__(self) -> None:
        self.complete = False
        self.payload = b""

    def header(self) -> bytes:
        return b"transfer-encoding: chunked\r\n"

    def feed(self, data: bytes) -> bytes:
        self.payload = data
        return chunk(data) if data else b""

    def eof(self) -> None:
        self.complete = True

    def end(self) -> bytes:
        return _LAST_CHUNK

    def append(self, payload: bytes) -> bytes | None:
        return chunk(payload) + _LAST_CHUNK


class ChunkedFrame:
    """A chunked body, passed on as it is except for its last chunk, which `end` gives.

    With `whole_chunks` an unfinished chunk is held back. Engines send an event of a stream as one
    chunk, so the client never sees half an event, and one can be added at any time.
    """

    __slots__ = ("_between", "_held", "_left", "_whole_chunks", "complete", "payload")

    def __init__(self, *, whole_chunks: bool) -> None:
        self._whole_chunks = whole_chunks
        self._held = b""
        self._left = 0  # payload bytes of the present chunk that are still to come
        self._between = True  # at the start of a chunk: not in its payload, nor before its CRLF
        self.complete = False
        self.payload = b""

    def header(self) -> bytes:
        return b"transfer-encoding: chunked\r\n"

    def feed(self, data: bytes) -> bytes:
        if self._held:
            data = self._held + data
        payloads: list[bytes] = []
        position = self._skip_whole_chunks(data, payloads) if self._between else 0
        while True:
            after = self._step(data, position, payloads)
            if self.complete or after == position:
                break
            position = after
        if self.complete and after != len(data):
            raise FramingError("bytes after the last chunk")
        self._held = b"" if self.complete else data[position:]
        self.payload = payloads[0] if len(payloads) == 1 else b"".join(payloads)
        return data[:position]

    def _skip_whole_chunks(self, data: bytes, payloads: list[bytes]) -> int:
        """Take the chunks that are all there, which is how they come; `_step` judges the rest."""
        position, end = 0, len(data)
        find, known_size, keep = data.find, _KNOWN_SIZES.get, payloads.append
        while True:
            line_end = find(_LINE_END, position, position + _LONGEST_LINE_BYTES)
            size = known_size(data[position:line_end], 0)
            after = line_end + size + 4  # two line ends
            if line_end < 0 or not size or after > end or not data.startswith(_LINE_END, after - 2):
                return position
            keep(data[line_end + 2 : after - 2])
            position = after

    def eof(self) -> None:
        """An early end leaves the body incomplete."""

    def end(self) -> bytes:
        return _LAST_CHUNK

    def append(self, payload: bytes) -> bytes | None:
        return chunk(payload) + _LAST_CHUNK if self._between else None

    def _step(self, data: bytes, position: int, payloads: list[bytes]) -> int:
        """Read one piece of the syntax. Returns where it ends; `position` if it is not all there."""
        if self._between:
            return self._read_size(data, position, payloads)
        if self._left:
            piece = data[position : position + self._left]
            if piece:
                payloads.append(piece)
                self._left -= len(piece)
            return position + len(piece)
        if len(data) - position < len(_LINE_END):
            return position
        self._between = True
        return _skip_line_end(data, position)

    def _read_size(self, data: bytes, position: int, payloads: list[bytes]) -> int:
        line_end = data.find(_LINE_END, position, position + _LONGEST_LINE_BYTES)
        if line_end < 0:
            if len(data) - position >= _LONGEST_LINE_BYTES:
                raise FramingError("no chunk size")
            return position
        match = _CHUNK_SIZE.fullmatch(data, position, line_end)
        if match is None:
            raise FramingError("bad chunk size")
        size = int(match[1], 16)
        _remember_size(match[0], size)
        start = line_end + len(_LINE_END)
        if size == 0:
            return self._read_last(data, position, line_end)
        if not self._whole_chunks:
            self._between = False
            self._left = size
            return start
        if size > LONGEST_HELD_CHUNK_BYTES:
            raise FramingError("chunk of a stream is too large")
        if len(data) < start + size + len(_LINE_END):
            return position
        payloads.append(data[start : start + size])
        return _skip_line_end(data, start + size)

    def _read_last(self, data: bytes, position: int, line_end: int) -> int:
        """Read the trailers, which are dropped, to the empty line after them."""
        blank = data.find(_LINE_END * 2, line_end)
        if blank >= 0:
            self.complete = True
            return blank + 2 * len(_LINE_END)
        if len(data) - position > _LONGEST_TRAILER_BYTES:
            raise FramingError("trailers are too large")
        return position


def _remember_size(line: bytes, size: int) -> None:
    if size > LONGEST_HELD_CHUNK_BYTES:
        return
    if len(_KNOWN_SIZES) >= _MOST_SIZES:
        _KNOWN_SIZES.clear()
    _KNOWN_SIZES[line] = size


def _skip_line_end(data: bytes, position: int) -> int:
    if data[position : position + len(_LINE_END)] != _LINE_END:
        raise FramingError("chunk longer than announced")
    return position + len(_LINE_END)


def chunk(payload: bytes) -> bytes:
    """Encode one chunk; without payload it would be the last one."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)
