"""How long a replica that is let go waits for its conversations to leave it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

_SHARE = 0.75
"""Of the time to drain; the rest is for the turns that run then."""
_NEWS = timedelta(seconds=1.5)
"""A report that was made so long after its routes changed knows all that was sent there before."""


@dataclass(frozen=True, slots=True)
class LeavingReplica:
    """A replica that is let go and whose conversations are served there until they have moved."""

    replica_id: str
    began_at: datetime
    drained_by: datetime | None
    """When it is stopped at the latest, with its node's own deadline taken in."""
    sessions_left: int
    moves_underway: int
    has_targets: bool
    """Whether any replica takes conversations of its deployment."""
    engine_answers: bool = True
    open_requests: int | None = None
    """As last reported; `None`: not said."""
    reported_at: datetime | None = None

    @property
    def deadline_at(self) -> datetime | None:
        """When whoever has not left is left behind."""
        if self.drained_by is None:
            return None
        return self.began_at + (self.drained_by - self.began_at) * _SHARE


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Nobody is waited for any more."""

    left_behind: int
    why: str


def decide_handover(replica: LeavingReplica, now: datetime) -> HandedOver | None:
    """Say whether the wait is over, and why; `None` while it goes on."""
    left = replica.sessions_left
    if not replica.engine_answers:
        return HandedOver(left, "its engine does not answer any more")
    if not left and not replica.moves_underway and _is_idle(replica):
        return HandedOver(0, "no session is left")
    if left and not replica.has_targets:
        return HandedOver(left, "no other replica takes its sessions")
    if replica.deadline_at is None or now >= replica.deadline_at:
        return HandedOver(left, "its time to hand sessions over is up")
    return None


def _is_idle(replica: LeavingReplica) -> bool:
    """Whether no turn runs that may yet be a session's first: such a one is recorded at its end."""
    if replica.open_requests is None:
        return True
    is_news = replica.reported_at is not None and replica.reported_at >= replica.began_at + _NEWS
    return is_news and not replica.open_requests
