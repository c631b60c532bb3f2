"""Reading of roll-ups."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Avg, Count, Max, Sum

from exaserve_ops.telemetry.domain.node_history import NodeHistory, draw_history
from exaserve_ops.telemetry.models import NodeMinute, ReplicaMinute


def minutes_of(replica_id: UUID, *, since: datetime) -> list[ReplicaMinute]:
    """One replica's minutes since a moment, oldest first."""
    rows = ReplicaMinute.objects.filter(replica_id=replica_id, minute__gte=since)
    return list(rows.order_by("minute"))


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """How fast replicas were, by their minutes with work."""

    tokens_per_second_each: float
    """Most that one replica made in a minute."""
    tokens_per_second_a_sequence: float
    """Of one request among those that ran beside one another, on average."""
    ttft_seconds: float | None
    """Until the first token, 95th percentile, on average over minutes."""
    minutes: int
    """What the figures are made of."""


def measured_rates(replica_ids: Collection[UUID], *, since: datetime) -> MeasuredRates | None:
    """Rates of these replicas since a moment; `None` where none of them had work."""
    busy = ReplicaMinute.objects.filter(
        replica_id__in=replica_ids,
        minute__gte=since,
        requests_running_mean__gt=0,
        generation_tokens_per_second_mean__gt=0,
    ).order_by()
    found = busy.aggregate(
        most=Max("generation_tokens_per_second_mean"),
        tokens=Sum("generation_tokens_per_second_mean"),
        running=Sum("requests_running_mean"),
        ttft=Avg("ttft_p95_seconds_max"),
        minutes=Count("pk"),
    )
    if not found["minutes"]:
        return None
    a_sequence = found["tokens"] / found["running"]
    return MeasuredRates(found["most"], a_sequence, found["ttft"], found["minutes"])


def history_of_node(node_id: UUID, *, since: datetime, until: datetime, step: timedelta) -> NodeHistory:
    """Lines of a node's machine and of what its replicas did meanwhile; one query."""
    rows = NodeMinute.objects.filter(
        node_id=node_id, minute__gte=since.replace(second=0, microsecond=0), minute__lt=until
    )
    return draw_history(rows.order_by("minute").iterator(), since=since, until=until, step=step)
