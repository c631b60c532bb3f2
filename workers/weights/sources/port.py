"""What every source can do, and how it fails."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from workers.weights.swarm.port import RangeReader


class SourceError(OSError):
    """A source does not give what was asked of it now; another may, or it may later."""


class MissingFileError(SourceError):
    """A source has not got that file, or not in that size: asking again is of no use."""


class OtherSizeError(MissingFileError):
    """A source has that file in another size than the manifest says: one of them is wrong."""


class RefusedError(SourceError):
    """A source does not let this node read: a secret is missing or not good enough."""


class BusyError(SourceError):
    """A source asks to be left alone for a while."""

    def __init__(self, text: str, retry_after_seconds: float) -> None:
        super().__init__(text)
        self.retry_after_seconds = retry_after_seconds


class NoRangesError(SourceError):
    """A source gives files only from their beginning."""


class Source(Protocol):
    """One place. Safe to use from several threads."""

    kind: str
    name: str
    """Host, or folder, for people."""

    def open_range(self, path: str, offset: int, length: int, /) -> AbstractContextManager[RangeReader]:
        """Begin to read so many bytes of a file. Raises `SourceError`."""
        ...

    def close(self) -> None:
        """Let connections go."""
        ...
