"""What both releases of a running rollout answer, counted as gateways report it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction

from exaserve_ops.lib.clock import from_unix
from exaserve_ops.rollouts.domain.durations import kind_of
from exaserve_ops.rollouts.domain.lifecycle import PAUSED, ROLLING_BACK, RUNNING
from exaserve_ops.rollouts.domain.policy import read_policy
from exaserve_ops.rollouts.domain.spread_of_values import bucket_of
from exaserve_ops.rollouts.models import ReleaseAnswers, Rollout
from exaserve_ops.rollouts.selectors import SLOT_SECONDS
from exaserve_ops.routing.domain.records import TurnRecord
from exaserve_ops.serving.models import Replica
from exaserve_ops.sessions.models import InferenceSession
from exaserve_ops.sessions.services import PositionedTurn

FAILED_OUTCOMES = frozenset({"engine_error", "interrupted", "unavailable"})
"""What is held against a release; a client's own errors and departures are not."""
_COUNTED = frozenset({"ok", "client_gone", *FAILED_OUTCOMES})
_EVENTS_WITH_A_GAP = 4
"""An answer of one token has fewer: its beginning, its end, and what comes after."""

_Key = tuple[UUID, UUID, datetime]


@dataclass(frozen=True, slots=True)
class _Answerer:
    """A replica of a deployment that rolls."""

    rollout_id: UUID
    release_id: UUID
    warm_at_seconds: float
    """From then on its answers count for durations; Unix seconds."""


@transaction.atomic
def count_answers(turns: Iterable[PositionedTurn]) -> int:
    """Count finished requests of deployments that roll; those counted before are passed over.

    Call it before the sessions' own record takes these turns in, which says where they were until now.
    """
    rolling = {
        rollout.deployment_id: rollout
        for rollout in Rollout.objects.filter(status__in=(RUNNING, PAUSED, ROLLING_BACK))
    }
    if not rolling:
        return 0
    ordered = [t for t in turns if t.turn.replica_id and t.turn.outcome in _COUNTED]
    answerers = _answerers({t.turn.replica_id for t in ordered}, rolling)
    last_replicas = _last_replicas(ordered)
    rows: dict[_Key, ReleaseAnswers] = {}
    counted = 0
    for positioned in ordered:
        turn = positioned.turn
        before = last_replicas.get(turn.session_id, "")
        last_replicas[turn.session_id] = turn.replica_id
        answerer = answerers.get(turn.replica_id)
        if answerer is not None:
            arrived = bool(turn.session_id) and before not in {"", turn.replica_id}
            counted += _count(_row(rows, answerer, turn), positioned, answerer, arrived=arrived)
    for row in rows.values():
        row.save()
    return counted


def _answerers(replica_ids: set[str], rolling: Mapping[UUID, Rollout]) -> dict[str, _Answerer]:
    found = Replica.objects.filter(pk__in=replica_ids, deployment__in=rolling)
    told = {}
    for pk, deployment, release, ready_at in found.order_by().values_list(
        "pk", "deployment", "release", "ready_at"
    ):
        rollout = rolling[deployment]
        warm_up = timedelta(seconds=read_policy(rollout.policy).warm_up_seconds)
        warm_at = (ready_at + warm_up).timestamp() if ready_at is not None else 0.0
        told[str(pk)] = _Answerer(rollout.pk, release, warm_at)
    return told


def _row(rows: dict[_Key, ReleaseAnswers], answerer: _Answerer, turn: TurnRecord) -> ReleaseAnswers:
    ended = turn.started_at_seconds + turn.duration_seconds
    slot_at = from_unix(ended - ended % SLOT_SECONDS)
    key = (answerer.rollout_id, answerer.release_id, slot_at)
    if key not in rows:
        rows[key], _ = ReleaseAnswers.objects.select_for_update().get_or_create(
            rollout_id=answerer.rollout_id, release_id=answerer.release_id, slot_at=slot_at
        )
    return rows[key]


def _last_replicas(turns: Iterable[PositionedTurn]) -> dict[str, str]:
    """Where sessions had their last turn before these."""
    ids = {one.turn.session_id for one in turns if one.turn.session_id}
    rows = InferenceSession.objects.filter(session_id__in=ids, replica__isnull=False)
    return {session: str(replica) for session, replica in rows.values_list("session_id", "replica")}


def _count(row: ReleaseAnswers, positioned: PositionedTurn, answerer: _Answerer, *, arrived: bool) -> int:
    if _order(positioned.position) <= _order(row.last_turn_key):
        return 0
    turn = positioned.turn
    row.last_turn_key = positioned.position
    row.requests += 1
    row.failed += turn.outcome in FAILED_OUTCOMES
    # What another replica kept waiting, or began, says nothing of how long this one takes.
    is_own = turn.attempts <= 1 and not turn.continued_from
    if is_own and turn.started_at_seconds >= answerer.warm_at_seconds:
        _count_durations(row, turn, arrived=arrived)
    return 1


def _count_durations(row: ReleaseAnswers, turn: TurnRecord, *, arrived: bool) -> None:
    if turn.ttft_seconds is None:
        return
    known = turn.prompt_tokens is not None and turn.cached_tokens is not None
    computed = (turn.prompt_tokens or 0) - (turn.cached_tokens or 0) if known else None
    kind = kind_of(streamed=turn.streamed_events > 0, computed_tokens=computed, arrived=arrived)
    _add(row.ttft.setdefault(kind, {}), turn.ttft_seconds)
    # By events, which every stream has: few clients ask for its usage.
    if turn.streamed_events >= _EVENTS_WITH_A_GAP and turn.outcome == "ok":
        _add(row.itl, (turn.duration_seconds - turn.ttft_seconds) / (turn.streamed_events - 1))


def _add(buckets: dict[str, int], seconds: float) -> None:
    name = str(bucket_of(seconds))
    buckets[name] = buckets.get(name, 0) + 1


def _order(position: str) -> tuple[int, int]:
    milliseconds, _, number = position.partition("-")
    return (int(milliseconds or 0), int(number or 0))
