"""What nodes were last told, so that saying it again costs no queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import Count, Max, OuterRef, Q, Subquery, Sum

from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.gang_rules import HEAD
from exaserve_ops.serving.domain.observed import WantedReplica
from exaserve_ops.serving.models import Replica, ReplicaMember
from exaserve_ops.serving.selectors.members import MEMBER_WAITS, ONE_NODE, WAITS_TO_START, live_members

READ_ANYWAY_RESYNCS = 10
"""Every so many resyncs all nodes are looked at, marks or not."""

Mark = tuple[Any, ...]


def node_marks() -> dict[str, Mark]:
    """For each node something that differs whenever what its wish is made of changed, in three queries."""
    rows = (
        Replica.objects.filter(ONE_NODE)
        .exclude(node=None)
        .exclude(status=states.STOPPED)
        .values_list("node_id")
        .annotate(Sum("generation"), Sum("deployment__generation"), Max("status_changed_at"))
        .annotate(told=Count("pk", filter=~WAITS_TO_START))
        .annotate(stand_by=Count("pk", filter=Q(role=Replica.Role.STANDBY)))
        .order_by()
    )
    marks = {str(node_id): tuple(mark) for node_id, *mark in rows}
    head = ReplicaMember.objects.filter(replica=OuterRef("replica"), number=HEAD)
    for node_id, *mark in (
        live_members()
        .values_list("node_id")
        .annotate(Sum("replica__generation"), Max("replica__status_changed_at"), Sum("replica__gang_epoch"))
        .annotate(Sum("replica__deployment__generation"), told=Count("pk", filter=~MEMBER_WAITS))
        .annotate(head_epochs=Sum(Subquery(head.values("epoch"))))
        .annotate(heads_ended=Count(Subquery(head.values("ended_at"))))
    ):
        marks[str(node_id)] = (*marks.get(str(node_id), ()), *mark)
    return {str(pk): marks.get(str(pk), ()) for pk in nodes_in_service().values_list("pk", flat=True)}


class SentWishes:
    """Used by the reconcilers' threads; each key is worked on by one of them at a time."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[int, tuple[WantedReplica, ...]]] = {}
        self._marks: dict[str, Mark] = {}
        self._resyncs = 0

    def keep(self, node_id: str, revision: int, replicas: tuple[WantedReplica, ...]) -> None:
        """Remember the newest wish of a node."""
        self._sent[node_id] = (revision, replicas)

    def of(self, node_id: str) -> tuple[int, tuple[WantedReplica, ...]] | None:
        """Revision and content of the newest wish."""
        return self._sent.get(node_id)

    def drop(self, node_id: str) -> None:
        """Forget a node that is no longer recorded."""
        self._sent.pop(node_id, None)

    def changed(self, marks: Mapping[str, Mark]) -> list[str]:
        """Nodes whose mark is new, or that are gone; now and then all of them."""
        before, self._marks = self._marks, dict(marks)
        self._resyncs += 1
        if self._resyncs % READ_ANYWAY_RESYNCS == 1:
            before = {}
        gone = (before.keys() | self._sent.keys()) - marks.keys()
        return [*(node_id for node_id, mark in marks.items() if before.get(node_id) != mark), *gone]
