"""Cuts text at stop strings, for engines that were told to leave them in."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopCut:
    """Holds back what may be the beginning of a stop string, across any number of pieces."""

    __slots__ = ("_held", "_pattern", "_prefixes")

    def __init__(self, stops: Sequence[str]) -> None:
        """Cut at whichever of `stops` begins first."""
        self._pattern = re.compile("|".join(map(re.escape, stops))) if stops else None
        self._prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown, and whether a stop string was met."""
        if self._pattern is None:
            return text, False
        text = self._held + text
        if met := self._pattern.search(text):
            self._held = ""
            return text[: met.start()], True
        longest = max(map(len, self._prefixes), default=0)
        open_length = next(
            (n for n in range(min(longest, len(text)), 0, -1) if text[-n:] in self._prefixes), 0
        )
        self._held = text[len(text) - open_length :]
        return text[: len(text) - open_length], False

    def flush(self) -> str:
        """Return what was held back, at the text's end."""
        held, self._held = self._held, ""
        return held
