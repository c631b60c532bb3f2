"""Fetching one revision from its sources: pieces are checked as they arrive, and only then kept.

Each thread asks the nearest source that may be asked for a run of pieces. A source that fails rests for a
while, ever longer; one that sends wrong bytes several times, or has not got the files, is asked no more.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from blake3 import blake3

from workers.weights.sources.port import (
    BusyError,
    MissingFileError,
    OtherSizeError,
    RefusedError,
    Source,
    SourceError,
)
from workers.weights.staging import Staged
from workers.weights.swarm.pieces import Piece
from workers.weights.swarm.port import RangeReader
from workers.weights.swarm.rates import SLICE_BYTES, RateCap, RateMeter

_RUN_PIECES = 16
_SYNC_SECONDS = 2.0
_LOOK_SECONDS = 0.2
_NICENESS = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """How patient a fetch is with its sources."""

    streams: int = 4
    bad_pieces: int = 3
    """Wrong pieces after which a source is asked no more."""
    failures: int = 8
    """In a row, after which a source is given up for this time."""
    first_rest_seconds: float = 0.5
    longest_rest_seconds: float = 30.0


@dataclass(slots=True)
class _Standing:
    """What became of asking one source."""

    source: Source
    bad_pieces: int = 0
    failures: int = 0
    rests_until: float = 0.0
    struck: str = ""
    """Why it is asked no more."""
    spoilt: bool = False
    """It gives other bytes than the manifest says."""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How a fetch goes."""

    ended: bool
    failure: str
    """Why it ended without the whole revision; empty while it goes on and when it is whole."""
    note: str
    """What it waits for, or what last went wrong."""
    bytes_per_second: float
    damaged_pieces: int
    sources: dict[tuple[str, str], int] = field(default_factory=dict)
    """Verified bytes by (kind, name)."""
    spoilt: bool = False
    """It ended because what is given is not what the manifest says."""


class Fetching(Protocol):
    """A way of fetching a revision."""

    def start(self) -> None:
        """Begin."""
        ...

    def stop(self) -> None:
        """End it, keeping what is verified."""
        ...

    def progress(self) -> FetchProgress:
        """How it goes now."""
        ...


class Fetch:
    """Runs until the revision is whole, until it cannot go on, or until it is stopped."""

    def __init__(
        self,
        staged: Staged,
        sources: Sequence[Source],
        caps: Sequence[RateCap],
        *,
        policy: FetchPolicy | None = None,
        nice: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.staged = staged
        self._policy = policy or FetchPolicy()
        self._caps = caps
        self._nice = nice
        self._clock = clock
        self._standings = [_Standing(source) for source in sources]
        self._runs = deque(_runs(staged))
        self._busy = 0
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._meter = RateMeter()
        self._sources: Counter[tuple[str, str]] = Counter()
        self._damaged = 0
        self._failure = ""
        self._note = ""
        self._living = 0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin."""
        count = max(1, min(self._policy.streams, len(self._runs)))
        self._living = count
        for number in range(count):
            thread = threading.Thread(target=self._run, name=f"fetch-weights-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        syncing = threading.Thread(target=self._keep_synced, name="sync-weights", daemon=True)
        self._threads.append(syncing)
        syncing.start()

    def stop(self) -> None:
        """End it, keeping what is verified. Waits for what is being read."""
        self._stop.set()
        with self._news:
            self._news.notify_all()
        for thread in self._threads:
            thread.join()
        for standing in self._standings:
            standing.source.close()

    def progress(self) -> FetchProgress:
        """How it goes now."""
        with self._news:
            return FetchProgress(
                ended=not self._living,
                failure=self._failure,
                note=self._note,
                bytes_per_second=self._meter.rate(),
                damaged_pieces=self._damaged,
                sources=dict(self._sources),
                spoilt=bool(self._failure) and any(one.spoilt for one in self._standings),
            )

    # -- threads ---------------------------------------------------------------------------------
    def _run(self) -> None:
        if self._nice:
            yield_to_others()
        try:
            self._work()
        except OSError as error:
            self._fail(f"{error.filename or self.staged.files}: {error.strerror or error}")
        except Exception as error:  # top of a thread: the fetch must not stay open
            logger.exception("fetching %s failed", self.staged.manifest.revision)
            self._fail(f"fetching failed: {type(error).__name__}")
        finally:
            with self._news:
                self._living -= 1
                self._news.notify_all()

    def _work(self) -> None:
        memory = memoryview(bytearray(self.staged.manifest.piece_bytes))
        while not self._stop.is_set():
            taken = self._take()
            if taken is None:
                return
            run, standing = taken
            left = list(run)
            try:
                self._pull(left, standing, memory)
            except SourceError as error:
                self._note_failure(standing, error)
            finally:
                self._give_back(left)

    def _take(self) -> tuple[list[Piece], _Standing] | None:
        """A run and whom to ask for it; waits for one. `None`: there is nothing left to do."""
        with self._news:
            while not self._stop.is_set() and not self._failure:
                if not self._runs and not self._busy:
                    return None
                standing = self._choose() if self._runs else None
                if standing is not None:
                    self._busy += 1
                    return self._runs.popleft(), standing
                self._news.wait(_LOOK_SECONDS)
        return None

    def _choose(self) -> _Standing | None:
        fit = [standing for standing in self._standings if not standing.struck]
        if not fit:
            told = "; ".join(standing.struck for standing in self._standings) or "it has no source"
            self._failure = f"no source gives it: {told}"
            return None
        now = self._clock()
        return next((standing for standing in fit if standing.rests_until <= now), None)

    def _pull(self, left: list[Piece], standing: _Standing, memory: memoryview) -> None:
        """Read the pieces of a run; each is taken off `left` once it is kept."""
        first, last = left[0], left[-1]
        length = last.offset + last.length - first.offset
        with standing.source.open_range(first.path, first.offset, length) as reader:
            while left and not self._stop.is_set():
                piece = left[0]
                data = memory[: piece.length]
                read_capped(reader, data, self._caps, self._stop.is_set)
                if not hmac.compare_digest(blake3(data).digest(), piece.digest):
                    self._note_bad(standing, piece)
                    return
                self.staged.write(piece, data)
                left.pop(0)
                self._note_good(standing, piece)

    def _give_back(self, left: list[Piece]) -> None:
        with self._news:
            self._busy -= 1
            if left:
                self._runs.appendleft(left)
            self._news.notify_all()

    # -- what became of sources ------------------------------------------------------------------
    def _note_good(self, standing: _Standing, piece: Piece) -> None:
        with self._news:
            standing.failures = 0
            self._note = ""
            self._meter.add(piece.length)
            self._sources[standing.source.kind, standing.source.name] += piece.length

    def _note_bad(self, standing: _Standing, piece: Piece) -> None:
        with self._news:
            self._damaged += 1
            standing.bad_pieces += 1
            name = standing.source.name
            self._note = f"{piece.path} from {name} is not what the manifest says at byte {piece.offset:,}"
            logger.warning("%s", self._note)
            if standing.bad_pieces >= self._policy.bad_pieces:
                standing.struck = f"{standing.bad_pieces} pieces from {name} were damaged"
                standing.spoilt = True

    def _note_failure(self, standing: _Standing, error: SourceError) -> None:
        if self._stop.is_set():
            return
        with self._news:
            standing.failures += 1
            self._note = str(error)
            policy = self._policy
            if isinstance(error, MissingFileError | RefusedError) or standing.failures >= policy.failures:
                standing.struck = str(error)
                standing.spoilt = isinstance(error, OtherSizeError)
            rest = policy.first_rest_seconds * 2 ** min(standing.failures - 1, 16)
            rest = min(rest, policy.longest_rest_seconds)
            if isinstance(error, BusyError):
                rest = max(rest, error.retry_after_seconds)
            standing.rests_until = self._clock() + rest

    def _fail(self, why: str) -> None:
        with self._news:
            self._failure = self._failure or why
            self._news.notify_all()

    def _keep_synced(self) -> None:
        """Have written pieces on the disk soon: activation then waits for little."""
        while not self._stop.wait(_SYNC_SECONDS) and self._living:
            try:
                self.staged.sync()
            except OSError as error:
                self._fail(f"{self.staged.files}: {error.strerror}")
                return


def read_capped(
    reader: RangeReader, data: memoryview, caps: Sequence[RateCap], stopped: Callable[[], bool]
) -> None:
    """Fill memory as fast as all caps let. Raises `SourceError`, also where it is stopped meanwhile."""
    if not any(cap.caps for cap in caps):
        reader.read_into(data)
        return
    for start in range(0, len(data), SLICE_BYTES):
        part = data[start : start + SLICE_BYTES]
        for cap in caps:
            cap.take(len(part))
        if stopped():
            raise SourceError("stopped")
        reader.read_into(part)


def yield_to_others() -> None:
    """Let this thread run when nobody else wants to: what serves goes first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _runs(staged: Staged) -> list[list[Piece]]:
    """Missing pieces that follow one another in one file, a few at a time; from all files in turn.

    Threads then write to different files: writers of one file wait for one another, and not idly.
    """
    by_file: dict[str, list[list[Piece]]] = {}
    for index in staged.marks.missing():
        piece = staged.row.piece(index)
        runs = by_file.setdefault(piece.path, [])
        follows = bool(runs) and runs[-1][-1].index + 1 == index
        if follows and len(runs[-1]) < _RUN_PIECES:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [run for in_turn in zip_longest(*by_file.values()) for run in in_turn if run is not None]
