"""One node's part in the swarm of one revision: it pulls by the plan, and gives what it has."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from workers.weights.swarm import passes
from workers.weights.swarm.board import PieceBoard
from workers.weights.swarm.parents import ORIGIN, Parent, ParentChoice, Standing
from workers.weights.swarm.pieces import PieceRow
from workers.weights.swarm.port import Origin, PieceSink
from workers.weights.swarm.pulling import PullFacts, PullLimits, Revision, Stage, StripePull
from workers.weights.swarm.rates import RateCap
from workers.weights.swarm.serving import PieceServer, Share


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What a node tells of its part."""

    have_pieces: int
    have_bytes: int
    total_bytes: int
    pulls: tuple[PullFacts, ...]
    standings: Mapping[str, Standing]
    by_parent: Mapping[str, int]
    """Verified bytes by whom they came from."""
    failure: str
    """Why this node cannot go on; empty where it can."""

    @property
    def origin_bytes(self) -> int:
        """Verified bytes that came from the origin."""
        return self.by_parent.get(ORIGIN, 0)

    @property
    def whole(self) -> bool:
        """Whether every piece is here and verified."""
        return self.have_bytes == self.total_bytes


class SwarmMember:
    """Joins at once as a giver; pulls once it has been told parents."""

    def __init__(
        self,
        server: PieceServer,
        row: PieceRow,
        sink: PieceSink,
        *,
        present: Iterable[int] = (),
        origin: Origin | None = None,
        limits: PullLimits | None = None,
        keys: passes.KeyRing | None = None,
        caps: Sequence[RateCap] = (),
    ) -> None:
        self._limits = limits or PullLimits()
        self._server = server
        self.keys = keys or passes.KeyRing()
        self.board = PieceBoard(row, present)
        self._revision = Revision(server.node_id, row, self.board, sink, self.keys, origin)
        self._caps = caps
        self._standings: dict[str, Standing] = {}
        self._pulls: dict[int, StripePull] = {}
        self._stripes = 0
        self._ended: Counter[str] = Counter()
        server.share(self._revision.name, Share(row, self.board, self.keys, sink.open_file))

    def follow(self, stripes: Sequence[Sequence[Parent]]) -> None:
        """Pull each stripe from the first of its parents; may be called again at any time."""
        if len(stripes) != self._stripes:
            self._end_pulls()
            self._stripes = len(stripes)
        for stripe, parents in enumerate(stripes):
            pull = self._pulls.get(stripe)
            if pull is None or (pull.ended and pull.facts.stage is not Stage.DONE):
                pull = self._begin(stripe)
                pull.follow(parents)
                pull.start()
            else:
                pull.follow(parents)

    def _begin(self, stripe: int) -> StripePull:
        if stripe in self._pulls:
            self._ended += self._pulls[stripe].facts.by_parent
        choice = ParentChoice(
            self._standings,
            strikes=self._limits.strikes,
            origin_patience_seconds=self._limits.origin_patience_seconds,
            clock=time.monotonic,
        )
        pieces = self._revision.row.stripe(stripe, self._stripes)
        pull = StripePull(self._revision, stripe, pieces, choice, limits=self._limits, caps=self._caps)
        self._pulls[stripe] = pull
        return pull

    def _end_pulls(self) -> None:
        for pull in self._pulls.values():
            pull.stop()
            self._ended += pull.facts.by_parent
        self._pulls.clear()

    def status(self) -> MemberStatus:
        """What is here, what comes from whom, and what went wrong."""
        manifest = self._revision.row.manifest
        pulls = tuple(pull.facts for pull in self._pulls.values())
        return MemberStatus(
            have_pieces=self.board.have,
            have_bytes=self.board.have_bytes,
            total_bytes=manifest.total_bytes,
            pulls=pulls,
            standings=dict(self._standings),
            by_parent=sum((facts.by_parent for facts in pulls), self._ended),
            failure=next((facts.why for facts in pulls if facts.stage is Stage.FAILED), ""),
        )

    def leave(self) -> None:
        """Pull and give no more."""
        self._server.unshare(self._revision.name)
        self.rest()

    def rest(self) -> None:
        """Pull no more; what is here is still given."""
        for pull in self._pulls.values():
            pull.stop(wait=False)
        self._end_pulls()
