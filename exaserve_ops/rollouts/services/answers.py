"""What both releases of a running rollout answer, counted as gateways report it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.lib.clock import from_unix
from exaserve_ops.rollouts.domain.lifecycle import PAUSED, ROLLING_BACK, RUNNING
from exaserve_ops.rollouts.domain.spread_of_values import bucket_of
from exaserve_ops.rollouts.models import ReleaseAnswers, Rollout
from exaserve_ops.rollouts.selectors import SLOT_SECONDS
from exaserve_ops.routing.domain.records import TurnRecord
from exaserve_ops.serving.models import Replica
from exaserve_ops.sessions.services import PositionedTurn

FAILED_OUTCOMES = frozenset({"engine_error", "interrupted", "unavailable"})
"""What is held against a release; a client's own errors and departures are not."""
_COUNTED = frozenset({"ok", "client_gone", *FAILED_OUTCOMES})
_TOKENS_WITH_A_GAP = 2

_Key = tuple[UUID, UUID, datetime]


@transaction.atomic
def count_answers(turns: Iterable[PositionedTurn]) -> int:
    """Count finished requests of deployments that roll; those counted before are passed over."""
    rolling = dict(
        Rollout.objects.filter(status__in=(RUNNING, PAUSED, ROLLING_BACK)).values_list("deployment", "pk")
    )
    if not rolling:
        return 0
    ordered = [t for t in turns if t.turn.replica_id and t.turn.outcome in _COUNTED]
    replicas = _releases_of({t.turn.replica_id for t in ordered}, rolling)
    rows: dict[_Key, ReleaseAnswers] = {}
    counted = 0
    for positioned in ordered:
        known = replicas.get(positioned.turn.replica_id)
        if known is not None:
            counted += _count(_row(rows, known, positioned.turn), positioned)
    for row in rows.values():
        row.save()
    return counted


def _releases_of(replica_ids: set[str], rolling: dict[UUID, UUID]) -> dict[str, tuple[UUID, UUID]]:
    """Rollout and release of each replica of a deployment that rolls."""
    found = Replica.objects.filter(pk__in=replica_ids, deployment__in=rolling)
    told = found.order_by().values_list("pk", "deployment", "release")
    return {str(pk): (rolling[deployment], release) for pk, deployment, release in told}


def _row(rows: dict[_Key, ReleaseAnswers], known: tuple[UUID, UUID], turn: TurnRecord) -> ReleaseAnswers:
    ended = turn.started_at_seconds + turn.duration_seconds
    slot_at = from_unix(ended - ended % SLOT_SECONDS)
    key = (*known, slot_at)
    if key not in rows:
        rollout_id, release_id = known
        rows[key], _ = ReleaseAnswers.objects.select_for_update().get_or_create(
            rollout_id=rollout_id, release_id=release_id, slot_at=slot_at
        )
    return rows[key]


def _count(row: ReleaseAnswers, positioned: PositionedTurn) -> int:
    if _order(positioned.position) <= _order(row.last_turn_key):
        return 0
    turn = positioned.turn
    row.last_turn_key = positioned.position
    row.requests += 1
    row.failed += turn.outcome in FAILED_OUTCOMES
    if turn.ttft_seconds is not None:
        _add(row.ttft, turn.ttft_seconds)
        tokens = turn.completion_tokens or 0
        if tokens >= _TOKENS_WITH_A_GAP and turn.outcome == "ok":
            _add(row.itl, (turn.duration_seconds - turn.ttft_seconds) / (tokens - 1))
    return 1


def _add(buckets: dict[str, int], seconds: float) -> None:
    name = str(bucket_of(seconds))
    buckets[name] = buckets.get(name, 0) + 1


def _order(position: str) -> tuple[int, int]:
    milliseconds, _, number = position.partition("-")
    return (int(milliseconds or 0), int(number or 0))
