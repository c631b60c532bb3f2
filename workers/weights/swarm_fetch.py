"""One revision on its way by a swarm: what a plain fetch is to its sources, this is to peers and origin."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from workers.protocol.weights import SwarmPull
from workers.weights.fetching import FetchProgress
from workers.weights.sources.port import Source, SourceError
from workers.weights.staging import Staged
from workers.weights.swarm import passes
from workers.weights.swarm.member import MemberStatus, SwarmMember
from workers.weights.swarm.parents import ORIGIN, Parent
from workers.weights.swarm.pieces import Piece
from workers.weights.swarm.port import RangeReader
from workers.weights.swarm.pulling import PullFacts, PullLimits, Stage
from workers.weights.swarm.rates import RateCap
from workers.weights.swarm.serving import PieceServer

_SYNC_SECONDS = 2.0
_STILL = (Stage.WAITING, Stage.DONE)


class SwarmFetch:
    """Pulls as it is told until the revision is whole; gives what it has before and after."""

    def __init__(
        self,
        server: PieceServer,
        staged: Staged,
        sources: Sequence[Source],
        *,
        ready_folder: Callable[[], Path],
        keys: passes.KeyRing,
        caps: Sequence[RateCap],
        limits: PullLimits,
    ) -> None:
        self._staged = staged
        self._sources = sources
        self._ready_folder = ready_folder
        self._stopped = threading.Event()
        self._failure = ""
        self._stripes: Sequence[Sequence[Parent]] = ()
        self._lock = threading.Lock()
        self._member = SwarmMember(
            server,
            staged.row,
            self,
            present=staged.marks.present(),
            origin=_FirstOf(sources),
            limits=limits,
            keys=keys,
            caps=caps,
        )
        self._started = False
        self._thread = threading.Thread(target=self._keep, name="swarm-fetch", daemon=True)

    # -- as a fetch ------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin to pull."""
        with self._lock:
            self._started = True
            self._member.follow(self._stripes)
        self._thread.start()

    def stop(self) -> None:
        """End pulling, keeping what is verified. What is whole is still given, the rest is not."""
        self._stopped.set()
        with self._lock:
            self._started = False
            if self._member.board.whole:
                self._member.rest()
            else:
                self._member.leave()
        if self._thread.ident is not None:
            self._thread.join()
        for source in self._sources:
            source.close()

    def progress(self) -> FetchProgress:
        """How it goes now."""
        status = self._member.status()
        origin = self._sources[0] if self._sources else None
        sources = {
            (origin.kind, origin.name) if parent == ORIGIN and origin is not None else ("peer", parent): count
            for parent, count in status.by_parent.items()
        }
        return FetchProgress(
            ended=status.whole or bool(status.failure or self._failure),
            failure=status.failure or self._failure,
            note=_note(status.pulls),
            bytes_per_second=sum(pull.meter.rate() for pull in status.pulls),
            damaged_pieces=sum(pull.bad_pieces for pull in status.pulls),
            sources=sources,
            spoilt=bool(status.failure) and any(pull.bad_pieces for pull in status.pulls),
        )

    # -- as a member -----------------------------------------------------------------------------
    @property
    def followed(self) -> bool:
        """Whether it was told whom to pull from."""
        return bool(self._stripes)

    @property
    def gives(self) -> bool:
        """Whether what it has is given to others."""
        return not self._member.board.closed

    @property
    def pieces(self) -> int:
        """Pieces of the revision."""
        return self._staged.row.count

    def follow(self, stripes: Sequence[Sequence[Parent]]) -> None:
        """Pull each stripe from the first of these that gives; may be told anew at any time."""
        with self._lock:
            self._stripes = stripes
            if self._started and stripes:
                self._member.follow(stripes)

    def status(self) -> MemberStatus:
        """What it sees of its parents."""
        return self._member.status()

    def pulls(self) -> tuple[SwarmPull, ...]:
        """What is told of each stripe that is under way."""
        now = time.monotonic()
        return tuple(
            SwarmPull(
                stripe=pull.stripe,
                parent=pull.parent,
                stage=pull.stage.value,
                bytes_per_second=round(pull.meter.rate()),
                starved_ratio=round(pull.starved_ratio, 2),
                lasted_seconds=round(now - pull.since, 1) if pull.parent else 0.0,
                bottleneck=pull.bottleneck(),
                why=pull.why[:200],
            )
            for pull in self._member.status().pulls
        )

    # -- as a sink -------------------------------------------------------------------------------
    def write(self, piece: Piece, data: memoryview, /) -> None:
        """Keep a verified piece in staging."""
        self._staged.write(piece, data)

    def open_file(self, path: str, /) -> int:
        """Open a file for giving, in staging or where it went when it was whole."""
        try:
            return self._staged.open_file(path)
        except FileNotFoundError:
            return os.open(self._ready_folder() / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _keep(self) -> None:
        """Have written pieces on the disk soon, so that activation waits for little."""
        while not self._stopped.wait(_SYNC_SECONDS) and not self._member.board.whole:
            try:
                self._staged.sync()
            except OSError as error:
                self._failure = f"{self._staged.files}: {error.strerror}"
                return


class _FirstOf:
    """The first source that gives, as the swarm's origin."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    @contextmanager
    def open_range(self, path: str, offset: int, length: int, /) -> Iterator[RangeReader]:
        """Begin to read a range where it is given."""
        refusals: list[str] = []
        for source in self._sources:
            try:
                opened = source.open_range(path, offset, length)
                reader = opened.__enter__()
            except SourceError as error:
                refusals.append(str(error))
                continue
            try:
                yield reader
            finally:
                opened.__exit__(None, None, None)
            return
        raise SourceError("; ".join(refusals) or "no source was named")


def _note(pulls: Sequence[PullFacts]) -> str:
    """What it waits for; empty while bytes come."""
    if not pulls:
        return "waits to be told whom to pull from"
    if any(pull.stage not in _STILL for pull in pulls):
        return ""
    return next((f"waits for a parent: {pull.why}" for pull in pulls if pull.why), "")
