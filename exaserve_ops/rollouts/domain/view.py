"""A rollout and everything that its next step depends on, as plain facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from exaserve_ops.rollouts.domain.gates import Answers, Health
from exaserve_ops.rollouts.domain.policy import RolloutPolicy
from exaserve_ops.serving.domain import lifecycle as states

SURGE = "surge"
IN_PLACE = "in_place"


@dataclass(frozen=True, slots=True)
class Seat:
    """One live replica of the deployment."""

    replica_id: str
    name: str
    release: str
    status: str
    is_wanted: bool
    """Meant to run on."""
    domain: str = ""
    node_id: str = ""
    node_name: str = ""
    node_alive: bool = True
    serves: bool = True
    """Its role; a standby serves nobody yet."""
    is_closed: bool = False
    """Ready for its agent, and no gateway can connect to it, or none has yet."""
    rolls_to: str = ""
    in_place: bool = False
    replaces: str = ""
    leaving_since: datetime | None = None
    """Since when its sessions are asked to leave."""
    sessions_left: int = 0
    """Active sessions that have not left it, and moves under way."""
    active_sessions: int = 0
    reason: str = ""
    restarts: int = 0
    since: datetime | None = None
    """When it came to be in its status."""

    @property
    def state(self) -> str:
        """What keeps it from answering, for people; its status where nothing does."""
        if self.is_wanted and self.node_id and not self.node_alive:
            return f"is on {self.node_name}, which is away"
        if self.status == states.READY and self.is_closed:
            return "is ready, and no gateway reaches it"
        return f"is {self.status.replace('_', ' ')}"

    @property
    def is_ready(self) -> bool:
        """Whether it answers, or would as a standby."""
        return self.is_wanted and self.status == states.READY and not self.is_closed and self.node_alive

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is to be waited for: a dead node cannot say that its process ended."""
        return not self.is_wanted and (self.status == states.STOPPED or not self.node_alive)


@dataclass(frozen=True, slots=True)
class WaveState:
    """One wave as recorded."""

    number: int
    status: str
    domain: str
    planned: int
    """How many replicas it is to have; who they are is settled when it opens."""
    soak_seconds: int
    needs_approval: bool
    since: datetime
    members: tuple[str, ...] = ()
    """Ids of replicas of the old release that make way in it."""
    mode: str = SURGE
    why: str = ""
    domains: tuple[str, ...] = ()
    """Its failure domains, where `domain` names several nodes together."""

    def covers(self, domain: str) -> bool:
        """Whether replicas of a failure domain may be in it."""
        return domain in (self.domains or (self.domain,))


@dataclass(frozen=True, slots=True)
class WeightsUnderWay:
    """Nodes of a wave that new weights are not ready on, by name, with the reason."""

    unready: Mapping[str, str] = field(default_factory=dict)
    spoilt: Mapping[str, str] = field(default_factory=dict)
    """Those of them where the weights themselves are at fault."""


@dataclass(frozen=True, slots=True)
class RolloutView:
    """One rollout, its deployment, and what is seen of both releases."""

    id: str
    status: str
    policy: RolloutPolicy
    old_release: str
    new_release: str
    wanted: int
    """Serving replicas."""
    surge: int
    unavailable: int
    seats: tuple[Seat, ...]
    waves: tuple[WaveState, ...]
    running_since: datetime
    """When it began, or was last let go on."""
    move_seconds: float
    """For how long nothing of a wave may come on, from what its replicas take to start and to drain."""
    start_seconds: float = 600.0
    """For how long one replica may start; its agent gives it up after that."""
    new_answers: Answers = field(default_factory=Answers)
    old_answers: Answers = field(default_factory=Answers)
    failed: tuple[str, ...] = ()
    """Replicas of the new release that were given up since it began or went on, with their reasons."""
    out_of_blocks: int = 0
    weights: WeightsUnderWay = WeightsUnderWay()
    deployment_ends: bool = False
    frozen: str = ""
    """Why nothing may be replaced now; empty where it may."""
    has_surge_room: bool = True
    """Whether one more replica of the new release would fit now."""

    @property
    def wave(self) -> WaveState | None:
        """The wave whose turn it is; `None` where all have passed."""
        return next((wave for wave in self.waves if wave.status != "passed"), None)

    def kept(self, release: str) -> tuple[Seat, ...]:
        """Replicas of a release that are meant to run on."""
        return tuple(seat for seat in self.seats if seat.is_wanted and seat.release == release)

    @property
    def missing(self) -> int:
        """How many of the wanted replicas do not serve now."""
        return max(0, self.wanted - sum(seat.is_ready and seat.serves for seat in self.seats))

    def absent(self, most: int = 3) -> str:
        """Who of those that should serve do not, and why."""
        seats = [s for s in self.seats if s.is_wanted and s.serves and not s.is_ready]
        more = f" and {len(seats) - most} more" if len(seats) > most else ""
        return ", ".join(f"{s.name} {s.state}" for s in seats[:most]) + more

    def health(self) -> Health:
        """How the new release's replicas fare."""
        kept = self.kept(self.new_release)
        worst = max(kept, key=lambda seat: (seat.restarts, seat.name), default=None)
        return Health(
            wanted=len(kept),
            ready=sum(seat.is_ready for seat in kept),
            not_ready=tuple(f"{s.name} {s.state}" for s in kept if not s.is_ready),
            failed=self.failed,
            restarts=worst.restarts if worst is not None else 0,
            restarted=worst.name if worst is not None else "",
            out_of_blocks=self.out_of_blocks,
        )
