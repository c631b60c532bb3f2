"""Server-sent events as they come out of an answer's body, however it was cut on its way."""

from __future__ import annotations

import re

from exaserve_ops.gateway.framing import FramingError

DONE = b"[DONE]"
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Collects bytes until an event is whole."""

    __slots__ = ("_limit_bytes", "_rest")

    def __init__(self, limit_bytes: int) -> None:
        """Hold at most so many bytes of an event that has not ended."""
        self._limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, payload: bytes) -> list[bytes]:
        """Return the events that are whole now, each without its end. Raises `FramingError`."""
        data = self._rest + payload if self._rest else payload
        events = []
        position = 0
        for end in _EVENT_END.finditer(data):
            events.append(data[position : end.start()])
            position = end.end()
        self._rest = data[position:]
        if len(self._rest) > self._limit_bytes:
            raise FramingError("event of a stream is too large")
        return events


def data_of(event: bytes) -> bytes | None:
    """Return what an event carries; `None` for a comment, or one that is none of ours."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def write_event(data: bytes) -> bytes:
    """Encode one event."""
    return b"data: %b\n\n" % data
