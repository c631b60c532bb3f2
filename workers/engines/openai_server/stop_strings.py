"""Ending text at stop strings that may lie across several deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextEnd(Protocol):
    """Says what of a growing text may be shown, and where it ends."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown, and whether a stop string was met."""
        ...

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        ...


def text_end(stops: Sequence[str], *, keeps_stop: bool = False) -> TextEnd:
    """Watch for any of `stops`; with `keeps_stop` the text goes to the end of the one that is met."""
    return StopKeeper(stops) if keeps_stop else StopFilter(stops)


class StopFilter:
    """Passes text on as soon as no stop string can begin in it any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Watch for any of `stops`; the earliest one in the text ends it."""
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown, and whether a stop string was met."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = self._open_length()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        shown, self._held = self._held, ""
        return shown

    def _open_length(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class StopKeeper:
    """Passes all text on at once, up to the end of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Watch for any of `stops`; the one that begins first ends the text."""
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=1)
        self._seen = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown, and whether a stop string was met."""
        before = len(self._seen)
        self._seen += text
        found = [(at, at + len(stop)) for stop in self._stops if (at := self._seen.find(stop)) >= 0]
        if found:
            return text[: min(found)[1] - before], True
        self._seen = self._seen[max(0, len(self._seen) - self._longest + 1) :]
        return text, False

    def flush(self) -> str:
        """Nothing was held back."""
        return ""
