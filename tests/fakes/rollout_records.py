"""Nodes and replicas of a simulated deployment: what is recorded of them, and what really runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import SERVING, HealingPolicy
from exaserve_ops.serving.domain.placement import NodeRoom, PlacementRequest

START = datetime(2026, 1, 1, tzinfo=UTC)
OLD, NEW = "release-1", "release-2"
WANTED_AFTER = {"drain": "drain", "stop": "stop", "cancel": "stop"}
POLICY = HealingPolicy()
REQUEST = PlacementRequest("torch", 1 << 30)
LOAD_SECONDS = 40
FETCH_SECONDS = 60
END_SECONDS = 6
DRAIN_SECONDS = 60
START_SECONDS = 200
"""For how long a replica may start before its agent gives it up."""
FAIL_SECONDS = 20
SUSPECT_SECONDS = 2
DEAD_SECONDS = 4


class Overtaken(Exception):  # noqa: N818 - no error: somebody came first
    """What was to be changed is no longer what was looked at."""


@dataclass(eq=False, slots=True)
class Machine:
    """One node."""

    name: str
    rack: str
    slots: int
    alive: bool = True
    silent_seconds: int = 0
    draining: str = ""
    is_slow: bool = False
    """Whatever starts here takes four times as long."""
    deaf_until: int = 0
    """Wishes are lost on their way to it."""
    late_until: int = 0
    """Its reports are late; its signs of life are not."""
    disk: str = ""
    """Why weights cannot be brought here now; empty where they can."""
    weights: dict[str, int] = field(default_factory=dict)
    """When each release's weights were, or will be, whole on its disk."""
    rows: dict[str, Row] = field(default_factory=dict)
    """What is recorded to be here."""
    room: NodeRoom | None = None

    @property
    def place(self) -> str:
        """Its rack, told or not."""
        return self.name.partition("-")[0]

    @property
    def is_lost(self) -> bool:
        """As the failure detector sees it."""
        return self.silent_seconds >= DEAD_SECONDS


@dataclass(eq=False, slots=True)
class Row:
    """One replica: its record, and what really runs of it."""

    id: str
    release: str
    role: str
    created_seconds: int
    replaces: str = ""
    made_for: str = ""
    status: str = states.PENDING
    wanted: str = "run"
    machine: Machine | None = None
    rolls_to: str = ""
    in_place: bool = False
    leaving_since: datetime | None = None
    targets: tuple[str, ...] = ()
    status_seconds: int = 0
    failed_seconds: int | None = None
    restarts: int = 0
    reason: str = ""
    healing_note: str = ""
    drain_until: int = 0
    opens_seconds: int = 0
    """From when on a gateway reaches it."""
    sessions: int = 0
    # What runs.
    told: str = ""
    """The wish that its agent knows."""
    born_seconds: int | None = None
    """Since when its process runs; `None`: there is none."""
    ends_seconds: int | None = None
    crashes_until: int = 0
    gave_up: str = ""
    """Why its agent gave it up."""
    counted: str = ""
    """The release that it is counted under as answering."""

    @property
    def is_kept(self) -> bool:
        return self.wanted == "run" and self.status != states.STOPPED

    @property
    def answers(self) -> bool:
        """Whether requests really reach it."""
        return self.status == states.READY and self.wanted == "run" and self.role == SERVING


def at(seconds: float) -> datetime:
    """A second of the world as a moment."""
    return START + timedelta(seconds=seconds)


def machines(racks: int, each: int, slots: int, *, named: bool = True) -> list[Machine]:
    """Nodes in racks, or with no rack known of any of them."""
    return [
        Machine(f"n{rack:02}-{index:03}", f"r{rack:02}" if named else "", slots)
        for rack in range(racks)
        for index in range(each)
    ]
