"""What the gateway reads out of an answer that it passes on: its proper end, and its usage figures.

Only the last few kilobytes are kept, and they are looked at once, when the answer is over.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from exaserve_ops.gateway import refusals
from exaserve_ops.gateway.framing import Frame

_FIRST_ERROR_STATUS = 400
_FIRST_SERVER_ERROR_STATUS = 500
_TAIL_BYTES = 4096
_DONE_BYTES = 128
"""Within so many bytes of a stream's end its `[DONE]` is looked for."""
_KEPT_BYTES = 8 * _TAIL_BYTES
"""Pieces are joined only now and then."""
_LARGEST_JSON_BYTES = 1024 * 1024


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the engine gave them; `None` where it did not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens whose KV was reused."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


NO_USAGE = Usage()


class _Ending(msgspec.Struct, frozen=True):
    """The two top-level fields that matter of an answer or of one event of it."""

    usage: Usage | None = None
    error: object = None


_decoder = msgspec.json.Decoder(_Ending)


class Answer(Protocol):
    """What becomes of an engine's answer on its way to the client."""

    @property
    def is_stream(self) -> bool:
        """Whether it consists of events."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended before its engine did."""

    def relay(self, passed: bytes, payload: bytes) -> bytes:
        """Take the next piece, with its framing and without; return what the client gets of it."""

    def is_finished(self) -> bool:
        """Whether nothing is missing if it ends here."""

    def ended_in_error(self) -> bool:
        """Whether the engine ended a stream by an error event of its own."""

    def last_words(self) -> bytes | None:
        """The event that ends a stream before its time; empty if it has had it; `None`: it is no stream."""

    def usage(self) -> Usage:
        """Token counts, all `None` if there are none."""


class JsonAnswer:
    """A plain answer: kept whole while it is small enough to read the usage from."""

    __slots__ = ("_parts", "_size_bytes")
    is_stream = False
    is_over = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def relay(self, passed: bytes, payload: bytes) -> bytes:
        """Take the next piece; it passes as it came."""
        self._size_bytes += len(payload)
        if self._size_bytes <= _LARGEST_JSON_BYTES:
            self._parts.append(payload)
        else:
            self._parts.clear()
        return passed

    def is_finished(self) -> bool:
        """Always: its framing says when it is whole."""
        return True

    def ended_in_error(self) -> bool:
        """Never: its status says so."""
        return False

    def last_words(self) -> None:
        """It has no room for any."""

    def usage(self) -> Usage:
        """Token counts, all `None` if there are none."""
        return _ending_of(b"".join(self._parts)).usage or NO_USAGE


class NoAnswer(JsonAnswer):
    """What there is before a head was read: the same for all requests, so nothing is kept in it."""

    __slots__ = ()

    def relay(self, passed: bytes, payload: bytes) -> bytes:  # noqa: ARG002 - an `Answer`
        """There is nothing to take."""
        return passed

    def usage(self) -> Usage:
        """Unknown."""
        return NO_USAGE


class StreamAnswer:
    """A stream of events, of which the end is kept."""

    __slots__ = ("_pieces", "_size_bytes", "_why_not_continued")
    is_stream = True
    is_over = False

    def __init__(self, why_not_continued: str = "") -> None:
        """`why_not_continued`: said where it breaks off; empty if nobody asked for that."""
        self._why_not_continued = why_not_continued
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def relay(self, passed: bytes, payload: bytes) -> bytes:
        """Take the next piece; it passes as it came."""
        self._pieces.append(payload)
        self._size_bytes += len(payload)
        if self._size_bytes > _KEPT_BYTES:
            self._shorten()
        return passed

    def is_finished(self) -> bool:
        """Whether the last event says that the stream is over: `[DONE]`, or an error."""
        return _is_done(self._shorten()) or self.ended_in_error()

    def ended_in_error(self) -> bool:
        """Whether the engine ended the stream by an error event of its own."""
        if b'"error"' not in self._shorten():
            return False
        events = _events_of(self._shorten())
        last = next((event for event in reversed(events) if event != b"[DONE]"), b"")
        return _ending_of(last).error is not None

    def last_words(self) -> bytes:
        """An error event of ours, unless the engine's own is the one that the client gets."""
        if self.ended_in_error():
            return b""
        is_between_events = not self._size_bytes or self._shorten().endswith((b"\n\n", b"\r\n\r\n"))
        event = refusals.interrupted_event(self._why_not_continued)
        return event if is_between_events else b"\n\n" + event

    def usage(self) -> Usage:
        """Token counts of the last event that carries any."""
        if b'"usage"' not in self._shorten():
            return NO_USAGE
        for event in reversed(_events_of(self._shorten())):
            if b'"usage"' in event and (usage := _ending_of(event).usage):
                return usage
        return NO_USAGE

    def _shorten(self) -> bytes:
        """Keep the end only, and return it."""
        if len(self._pieces) == 1 and self._size_bytes <= _TAIL_BYTES:
            return self._pieces[0]
        tail = b"".join(self._pieces)[-_TAIL_BYTES:]
        self._pieces = [tail]
        self._size_bytes = len(tail)
        return tail


def _is_done(tail: bytes) -> bool:
    """Whether the last event is `[DONE]`."""
    if b"[DONE]" not in tail[-_DONE_BYTES:]:
        return False
    events = _events_of(tail[-_DONE_BYTES:]) or _events_of(tail)
    return events[-1:] == [b"[DONE]"]


def _events_of(tail: bytes) -> list[bytes]:
    return [line[5:].strip() for line in tail.splitlines() if line.startswith(b"data:")]


def judge(status: int, answer: Answer) -> str:
    """Return the outcome of an answer that came whole: `ok`, `client_error` or `engine_error`."""
    if status >= _FIRST_SERVER_ERROR_STATUS:
        return "engine_error"
    if status >= _FIRST_ERROR_STATUS:
        return "client_error"
    return "engine_error" if answer.ended_in_error() else "ok"


def interruption_of(answer: Answer, frame: Frame | None) -> bytes | None:
    """Return the bytes that end a stream with one error event; `None` where it cannot be put."""
    words = answer.last_words()
    if frame is None or words is None:
        return None
    return frame.append(words) if words else frame.end()


def read_usage(usage: object) -> Usage:
    """Read token counts; what is not as it should be is unknown."""
    try:
        return msgspec.convert(usage, Usage)
    except msgspec.ValidationError:
        return NO_USAGE


def _ending_of(text: bytes) -> _Ending:
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError):  # not JSON, or cut by the tail: nothing is known
        return _Ending()
