"""Reads that only pages need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Count, Q, QuerySet, Sum
from django.db.models.functions import Length
from django.http import QueryDict

from exaserve_ops.audit.models import Event
from exaserve_ops.audit.selectors import events_of
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.dashboard.sleep_words import SleepSight
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain import sleep
from exaserve_ops.serving.domain.reach import CLOSED
from exaserve_ops.serving.models import Replica, ReplicaMember
from exaserve_ops.serving.selectors.handover import hands_over, stands_down
from exaserve_ops.serving.selectors.members import on_node
from exaserve_ops.sessions.domain.handover import LeavingReplica
from exaserve_ops.sessions.models import InferenceSession
from exaserve_ops.sessions.selectors import ACTIVE_FOR
from exaserve_ops.sessions.selectors.moves import departures, leaving_replicas
from exaserve_ops.telemetry.models import ReplicaMinute

ACTIVE_SESSION_AGE = timedelta(minutes=15)
HISTORY_ROWS = 20
BY_NUMBER = (Length("name"), "name")
"""Order of one deployment's replicas: 2 before 10."""
LOAD_SECONDS = 10.0
"""What was reported longer ago is no longer shown as the load of now."""


def nodes_with_counts() -> QuerySet[Node]:
    """Nodes with rack, and how many replicas and accelerators each has."""
    live = ~Q(replicas__status=states.STOPPED) & Q(replicas__isnull=False)
    parts = Q(replica_members__number__gt=0, replica_members__ended_at=None) & ~Q(
        replica_members__replica__status=states.STOPPED
    )
    return Node.objects.select_related("failure_domain__parent__parent").annotate(
        replica_count=Count("replicas", live, distinct=True) + Count("replica_members", parts, distinct=True),
        ready_count=Count(
            "replicas", Q(replicas__status=states.READY) & ~Q(replicas__reach__in=CLOSED), distinct=True
        )
        + Count("replica_members", parts & Q(replica_members__replica__status=states.READY), distinct=True),
        accelerator_count=Count("accelerators", Q(accelerators__split=False), distinct=True),
    )


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far the draining of a node is."""

    left: int
    """Replicas that are still here, those on the way out included."""
    leaving: int
    is_over: bool
    """Whether the deadline has passed."""
    sessions: int = 0
    """Active ones that are still served here."""
    left_behind: int = 0
    """That had not left replicas of the node when those had to end."""


def drain_of(node: Node) -> DrainProgress:
    """How far the draining of a node is, in three queries."""
    here = Replica.objects.filter(on_node(node.pk)).exclude(status=states.STOPPED)
    counts = here.aggregate(
        left=Count("pk"), leaving=Count("pk", filter=Q(status__in=(states.DRAINING, states.STOPPING)))
    )
    now, deadline = clock.now(), node.drain_deadline_at
    active = InferenceSession.objects.filter(replica__in=here, last_turn_at__gt=now - ACTIVE_FOR)
    since = node.drain_changed_at or now
    behind = Replica.objects.filter(node=node, handed_over_at__gte=since).aggregate(sum=Sum("left_behind"))
    return DrainProgress(
        counts["left"],
        counts["leaving"],
        is_over=deadline is not None and deadline <= now,
        sessions=active.count(),
        left_behind=behind["sum"] or 0,
    )


def leaving_of(replica: Replica) -> LeavingReplica | None:
    """How far its conversations have left a replica that they are leaving; `None` where they stay."""
    if hands_over(replica) or stands_down(replica):
        waiting = leaving_replicas(now=clock.now(), only=replica.pk)
        return waiting[0] if waiting else None
    if replica.status != states.READY or not replica.departure:
        return None
    now = clock.now()
    progress = departures([replica.pk], now=now)[replica.pk]
    return LeavingReplica(
        replica_id=str(replica.pk),
        began_at=now,
        drained_by=None,
        sessions_left=progress.sessions_left,
        moves_underway=progress.moves_underway,
        has_targets=True,
    )


def members_of(replica: Replica) -> list[ReplicaMember]:
    """The parts of a replica, if it runs on several nodes."""
    return list(replica.members.select_related("node")) if replica.node_count > 1 else []


def sleep_of(replica: Replica) -> SleepSight:
    """Whether a replica sleeps, as recorded; what its engine tells is not in it."""
    release, deployment = replica.release, replica.deployment
    stands_by = replica.role == Replica.Role.STANDBY
    return SleepSight(
        state=replica.sleep_state,
        since=replica.sleep_since,
        answers=replica.status in (states.READY, states.DRAINING),
        is_to_sleep=stands_by and deployment.standbys_sleep,
        note=replica.sleep_note,
        refusal=sleep.refusal(release.engine, release.engine_options, nodes=replica.node_count),
    )


def replicas_with_places() -> QuerySet[Replica]:
    """Replicas, those that ended included, with deployment and node."""
    return Replica.objects.select_related("deployment", "node")


def active_sessions(deployment_id: UUID, *, now: datetime) -> dict[str, int]:
    """Conversations with a turn in the last quarter of an hour, by replica."""
    rows = (
        InferenceSession.objects.filter(
            replica__deployment=deployment_id, last_turn_at__gte=now - ACTIVE_SESSION_AGE
        )
        .order_by()
        .values_list("replica")
        .annotate(count=Count("pk"))
    )
    return {str(replica): count for replica, count in rows}


def history_of(kind: str, subject_id: object) -> list[Event]:
    """Last events of one subject."""
    return list(events_of(kind, subject_id)[:HISTORY_ROWS])


def minutes_of(replica_ids: list[UUID], *, since: datetime) -> dict[UUID, list[ReplicaMinute]]:
    """Minute roll-ups of replicas, oldest first."""
    found: dict[UUID, list[ReplicaMinute]] = {replica_id: [] for replica_id in replica_ids}
    rows = ReplicaMinute.objects.filter(replica_id__in=replica_ids, minute__gte=since)
    for row in rows.order_by("minute"):
        found[row.replica_id].append(row)
    return found


def load_of(telemetry: dict[str, Any] | None, replica_id: object) -> dict[str, Any]:
    """A replica's last load out of its node's telemetry; empty where nothing was said."""
    replicas = (telemetry or {}).get("replicas", {})
    return dict((replicas.get(str(replica_id)) or {}).get("load") or {})


def with_loads(replicas: Iterable[Replica], *, now_seconds: float) -> list[tuple[Replica, Mapping[str, Any]]]:
    """Replicas with their load; empty where it is not known, or older than `LOAD_SECONDS`."""
    rows = list(replicas)
    telemetry = live_reader().read_nodes({str(row.node_id) for row in rows if row.node_id})
    fresh = {i: t for i, t in telemetry.items() if now_seconds - (t["received_at"] or 0) <= LOAD_SECONDS}
    return [(row, load_of(fresh.get(str(row.node_id)), row.pk)) for row in rows]


def chosen(query: QueryDict, name: str) -> str:
    """One parameter, trimmed."""
    return str(query.get(name, "")).strip()
