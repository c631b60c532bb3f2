"""Which of what a page shows exists in a simulation only, so that it is never taken for capacity."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from uuid import UUID

from django.db.models import Count, Q

from exaserve_ops.audit.models import Event
from exaserve_ops.health.models import Incident
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.models import Replica

KINDS = (("False", "real"), ("True", "simulated"))
"""Options of a filter by whether a node is simulated."""


@dataclass(frozen=True, slots=True)
class SimulatedShare:
    """How many of some nodes are simulated."""

    simulated: int
    total: int

    @property
    def is_all(self) -> bool:
        """Whether nothing of it is real."""
        return 0 < self.simulated == self.total


def share_of_fleet() -> SimulatedShare:
    """How many of the nodes in service are simulated. One short query."""
    counts = nodes_in_service().aggregate(simulated=Count("pk", filter=Q(simulated=True)), total=Count("pk"))
    return SimulatedShare(counts["simulated"], counts["total"])


def share_of_nodes(node_ids: Collection[UUID]) -> SimulatedShare:
    """How many of these nodes are simulated. One short query."""
    return SimulatedShare(Node.objects.filter(pk__in=node_ids, simulated=True).count(), len(node_ids))


def simulated_subjects(events: Iterable[Event]) -> frozenset[str]:
    """Ids of the events' subjects that are simulated, or concern simulated nodes alone.

    One short query for each kind of subject that occurs.
    """
    by_kind: dict[str, set[str]] = {}
    for event in events:
        if event.subject_kind in _SIMULATED_OF:
            by_kind.setdefault(event.subject_kind, set()).add(event.subject_id)
    return frozenset().union(*(_SIMULATED_OF[kind](ids) for kind, ids in by_kind.items()))


def simulated_replicas_of(deployment_ids: Collection[UUID]) -> dict[UUID, int]:
    """How many live replicas of each deployment stand on simulated nodes. One query."""
    rows = Replica.objects.filter(deployment__in=deployment_ids, node__simulated=True)
    rows = rows.exclude(status=states.STOPPED).order_by()
    return dict(rows.values_list("deployment").annotate(count=Count("pk")))


def simulated_incidents(incidents: Iterable[Incident]) -> frozenset[UUID]:
    """Ids of the incidents that concern simulated nodes alone. One short query."""
    rows = [row for row in incidents if row.node_ids]
    simulated = _nodes({str(node_id) for row in rows for node_id in row.node_ids})
    return frozenset(row.pk for row in rows if simulated.issuperset(map(str, row.node_ids)))


def _nodes(ids: Collection[str]) -> set[str]:
    return set(map(str, Node.objects.filter(pk__in=ids, simulated=True).values_list("pk", flat=True)))


def _replicas(ids: Collection[str]) -> set[str]:
    rows = Replica.objects.filter(pk__in=ids, node__simulated=True).order_by()
    return set(map(str, rows.values_list("pk", flat=True)))


def _deployments(ids: Collection[str]) -> set[str]:
    rows = Replica.objects.filter(deployment__pk__in=ids, node__isnull=False).order_by()
    return _wholly_simulated(rows.values_list("deployment", "node__simulated").distinct())


def _incidents(ids: Collection[str]) -> set[str]:
    return set(map(str, simulated_incidents(Incident.objects.filter(pk__in=ids))))


def _wholly_simulated(pairs: Iterable[tuple[UUID, bool]]) -> set[str]:
    """Ids that come with nothing but simulated nodes."""
    known: dict[str, bool] = {}
    for pk, is_simulated in pairs:
        known[str(pk)] = known.get(str(pk), True) and is_simulated
    return {pk for pk, is_simulated in known.items() if is_simulated}


_SIMULATED_OF = {
    "node": _nodes,
    "replica": _replicas,
    "deployment": _deployments,
    "incident": _incidents,
}
