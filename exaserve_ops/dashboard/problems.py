"""What is wrong in the fleet now, with its cause and what is being done about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q
from django.urls import reverse

from exaserve_ops.dashboard.simulation import simulated_incidents
from exaserve_ops.health.domain import incident
from exaserve_ops.health.models import Incident
from exaserve_ops.health.selectors import open_incidents
from exaserve_ops.inventory.domain import liveness
from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.selectors import broken_replicas

MAX_SHOWN = 12
DEGRADED = "degraded"
"""Word for a node whose heartbeats arrive while a part of its agent stands still."""
PROBLEM_EVENTS = (
    "opened", "missed", "lost", "node_lost", "seen_failed", "seen_backing_off", "exited", "degraded", "waits",
    "stalled", "slow", "healing_waits", "quarantined",
)  # fmt: skip
"""Events that the bell's page shows."""

_BAD_NODE = Q(liveness__in=[liveness.DEAD, liveness.SUSPECT]) | ~Q(degraded_reason="")
_BAD_REPLICA = Q(status__in=[states.FAILED, states.BACKING_OFF, states.PENDING]) | (
    Q(status=states.READY) & ~Q(unroutable_reason="")
)
_DOING = {
    incident.OPEN: "Nobody is declared dead, healing waits: until reports return or you decide it there.",
    liveness.DEAD: "Its replicas take no requests and are replaced elsewhere where there is room.",
    liveness.SUSPECT: "Watched; one more missed heartbeat and it counts as dead.",
    states.FAILED: "Replaced on another node.",
    states.BACKING_OFF: "Its agent starts it again after a pause.",
    states.PENDING: "Placed as soon as a node has room.",
    states.READY: "Routed again when a gateway reaches it.",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One open problem: the object, since when, why, and what the fleet does about it."""

    kind: str
    name: str
    url: str
    status: str
    since: datetime
    cause: str
    doing: str
    simulated: bool = False
    """Whether it concerns simulated nodes alone."""


def open_problems() -> list[Problem]:
    """The worst first, `MAX_SHOWN` of each kind at most. Four queries."""
    nodes = Node.objects.filter(_BAD_NODE).order_by("-liveness_changed_at")[:MAX_SHOWN]
    replicas = (
        Replica.objects.filter(_BAD_REPLICA).select_related("node").order_by("-status_changed_at")[:MAX_SHOWN]
    )
    incidents = list(open_incidents()[:MAX_SHOWN])
    simulated = simulated_incidents(incidents)
    of_incidents = (_of_incident(found, simulated=found.pk in simulated) for found in incidents)
    problems = [*of_incidents, *map(_of_node, nodes), *map(_of_replica, replicas)]
    order = {incident.OPEN: 0, liveness.DEAD: 1, states.FAILED: 2, liveness.SUSPECT: 3}
    return sorted(problems, key=lambda p: (order.get(p.status, 4), -p.since.timestamp()))


def count_problems() -> tuple[int, int]:
    """How many nodes are dead and how many replicas failed. Two short queries."""
    dead = Node.objects.filter(liveness=liveness.DEAD).count()
    return dead, Replica.objects.filter(status=states.FAILED).count()


def count_open_problems() -> int:
    """What the bell counts: open incidents, dead nodes and broken replicas. Three short queries."""
    dead = Node.objects.filter(liveness=liveness.DEAD).count()
    return open_incidents().count() + dead + broken_replicas().count()


def title_state(parts: Sequence[tuple[int, str]], page: str) -> str:
    """Write a title that says the state: `1 dead · Fleet`."""
    said = [f"{count} {word}" for count, word in parts if count]
    return " · ".join([*said, page])


def _of_incident(found: Incident, *, simulated: bool) -> Problem:
    return Problem(
        kind="incident",
        name=str(found),
        url=reverse("incident", args=[found.pk]),
        status=found.status,
        since=found.opened_at,
        cause=found.evidence,
        doing=_DOING[incident.OPEN],
        simulated=simulated,
    )


def _of_node(node: Node) -> Problem:
    degraded = node.liveness == liveness.ALIVE
    return Problem(
        kind="node",
        name=node.name,
        url=reverse("node", args=[node.pk]),
        status=DEGRADED if degraded else node.liveness,
        since=node.liveness_changed_at,
        cause=node.degraded_reason if degraded else node.liveness_reason,
        doing="Heartbeats still arrive; see the node." if degraded else _DOING.get(node.liveness, ""),
        simulated=node.simulated,
    )


def _of_replica(replica: Replica) -> Problem:
    return Problem(
        kind="replica",
        name=replica.name,
        url=reverse("replica", args=[replica.pk]),
        status=replica.status,
        since=replica.status_changed_at,
        cause=replica.unroutable_reason if replica.status == states.READY else replica.reason,
        doing=f"Waits: {replica.healing_note}" if replica.healing_note else _DOING.get(replica.status, ""),
        simulated=replica.node is not None and replica.node.simulated,
    )
