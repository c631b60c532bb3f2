"""Having conversations leave replicas that still serve: what a rollout asks for before it lets them go.

A rollout asks for the departure, watches `sessions.selectors.moves.departures` until nothing is left (or its
patience ends), and then drains the replicas, which hands over whoever is left.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import Happening, record_events
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.hints import ring
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.departure import Departure
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import subject_of


@transaction.atomic
def ask_departure(
    replica_ids: Collection[UUID], departure: Departure, *, actor: str, now: datetime
) -> list[UUID]:
    """Have the conversations of these replicas leave, and have no first turn go there any more.

    With `departure.moves` they move between their turns, at the pace that the budget of moves allows, to
    `departure.targets` (any of the deployment where it names none); without, they stay until they end.
    Their KV goes along where the target has the same weights; otherwise nothing that was computed is worth
    anything there, and the target computes each context again. Asked for again, the newest wish holds.

    Returns the replicas that it is in force for: one that is being let go already hands over anyway, and
    is left out. Raises `ConflictError` where a target is one of those that leave.
    """
    if both := set(departure.targets) & {str(pk) for pk in replica_ids}:
        raise ConflictError(f"replica {min(both)} is both left and moved to")
    rows = list(_serving(replica_ids))
    changed = [row for row in rows if row.departure != departure.to_json()]
    for row in changed:
        row.departure = departure.to_json()
    _record(changed, "departure_asked", departure.why, actor, now)
    return [row.pk for row in rows]


@transaction.atomic
def withdraw_departure(replica_ids: Collection[UUID], *, reason: str, actor: str, now: datetime) -> None:
    """Have replicas keep their conversations after all, and take new ones: a rollout that turns back.

    Moves that are under way go on. Where nothing was asked for, nothing changes.
    """
    rows = [row for row in _serving(replica_ids) if row.departure]
    for row in rows:
        row.departure = {}
    _record(rows, "departure_withdrawn", reason, actor, now)


def _serving(replica_ids: Collection[UUID]) -> Collection[Replica]:
    rows = Replica.objects.select_for_update().filter(pk__in=replica_ids, wanted=Replica.Wanted.RUN)
    return rows.exclude(status=states.STOPPED).order_by("pk")


def _record(rows: Collection[Replica], event: str, reason: str, actor: str, now: datetime) -> None:
    Replica.objects.bulk_update(rows, ["departure"])
    happenings = [Happening(subject_of(row), event, ("", ""), reason, row.generation) for row in rows]
    record_events(happenings, actor=actor, now=now)
    if rows:
        ring("routes", "all")
