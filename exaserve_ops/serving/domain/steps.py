"""The steps of a plan, each with a why, and what is waited for meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from exaserve_ops.serving.domain.facts import SERVING
from exaserve_ops.serving.domain.placement import Placement

ACTIONS = (
    *("create", "place", "wait", "drain", "stop", "cancel", "finish"),
    *("promote", "stand_down", "replace", "hold", "quarantine"),
)
"""What steps are called where they are shown."""


@dataclass(frozen=True, slots=True)
class Create:
    """Make `count` new replicas."""

    count: int
    why: str
    role: str = SERVING


@dataclass(frozen=True, slots=True)
class Place:
    """Send a pending replica to a node."""

    replica_id: str
    placement: Placement

    @property
    def why(self) -> str:
        """Why this node."""
        return self.placement.why


@dataclass(frozen=True, slots=True)
class Wait:
    """A pending replica has nowhere to go."""

    replica_id: str
    why: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Drain, stop or cancel a replica: whichever its status calls for."""

    replica_id: str
    event: str
    """Lifecycle event: `drain`, `stop` or `cancel`."""
    why: str
    successor: str = ""
    """Id of the release of a replica that is made in the same moment, and takes its place; empty: none is."""
    in_order: bool = False
    """It runs on several nodes and may have open requests: its head goes first, at once, then the others."""


@dataclass(frozen=True, slots=True)
class Promote:
    """A standby is to take requests."""

    replica_id: str
    """The standby."""
    instead_of: str
    """A replica that takes none and swaps roles with it; empty: more are to serve than there are."""
    why: str


@dataclass(frozen=True, slots=True)
class StandDown:
    """A serving replica becomes a standby: fewer are to serve, and more to stand by."""

    replica_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Make a new replica at once on a node that has room; the old one goes when it is ready."""

    replica_id: str
    """The old one."""
    placement: Placement
    role: str
    cause: str
    why: str


@dataclass(frozen=True, slots=True)
class Hold:
    """A replica needs healing, and this is why it is not healed now. Empty: no longer so."""

    replica_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Place nothing more on accelerators whose memory does not come free."""

    replica_id: str
    accelerator_uuids: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class FinishDeletion:
    """The last replica of a deleted deployment is gone."""

    why: str = "no replica is left"


Step = Create | Place | Wait | LetGo | Promote | StandDown | Replace | Hold | Quarantine | FinishDeletion


@dataclass(frozen=True, slots=True)
class Waiting:
    """A replica for which something is still to come, and what that is."""

    replica_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done now, and what is waited for."""

    steps: tuple[Step, ...]
    waiting: tuple[Waiting, ...]
