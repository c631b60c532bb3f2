"""Writing of sessions, behind the requests and in batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from django.db import transaction

from exaserve_ops.routing.domain.records import TurnRecord
from exaserve_ops.serving.models import Replica
from exaserve_ops.sessions.domain.timeline import TurnMark, add_to_stays, add_turn
from exaserve_ops.sessions.models import InferenceSession

OUTCOMES_THAT_COUNT_AS_SERVED = frozenset({"ok", "client_gone"})


@dataclass(frozen=True, slots=True)
class PositionedTurn:
    """A turn and its place in the stream, which tells a second delivery from a second turn."""

    position: str
    turn: TurnRecord


@transaction.atomic
def record_turns(turns: Iterable[PositionedTurn]) -> int:
    """Count turns into their sessions; those counted before are passed over. Returns how many counted.

    Four statements however many turns. Anonymous turns have no session and are passed over.
    """
    ordered = [t for t in turns if t.turn.session_id]
    if not ordered:
        return 0
    names = {(t.turn.model, t.turn.session_id) for t in ordered}
    ids = {session_id for _, session_id in names}
    known = {
        (row.model_name, row.session_id): row
        for row in InferenceSession.objects.select_for_update().filter(session_id__in=ids)
    }
    replicas = _nodes_of({t.turn.replica_id for t in ordered if t.turn.replica_id})
    counted = 0
    for positioned in ordered:
        turn = positioned.turn
        key = (turn.model, turn.session_id)
        row = known.get(key) or _new(turn)
        if _order(positioned.position) <= _order(row.last_turn_key):
            continue
        known[key] = row
        _count(row, positioned, replicas)
        counted += 1
    touched = [known[name] for name in sorted(names) if name in known]
    InferenceSession.objects.bulk_create(
        touched,
        update_conflicts=True,
        unique_fields=["model_name", "session_id"],
        update_fields=_MUTABLE,
    )
    return counted


def delete_sessions_before(moment: datetime) -> int:
    """Forget sessions that have been quiet since then."""
    return InferenceSession.objects.filter(last_turn_at__lt=moment).delete()[0]


_MUTABLE = [
    "replica",
    "node_name",
    "turns",
    "failed_turns",
    "replica_changes",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "context_tokens",
    "last_ttft_seconds",
    "last_outcome",
    "last_why",
    "latest_turns",
    "stays",
    "last_turn_key",
    "last_turn_at",
]


def _new(turn: TurnRecord) -> InferenceSession:
    at = datetime.fromtimestamp(turn.started_at_seconds, tz=UTC)
    return InferenceSession(
        session_id=turn.session_id, model_name=turn.model, first_turn_at=at, last_turn_at=at
    )


def _count(row: InferenceSession, positioned: PositionedTurn, nodes: dict[str, str]) -> None:
    turn = positioned.turn
    row.turns += 1
    if turn.outcome not in OUTCOMES_THAT_COUNT_AS_SERVED:
        row.failed_turns += 1
    if turn.replica_id in nodes:
        if turn.continued_from:
            row.replica_changes += len(turn.continued_from)
        elif row.replica_id is not None and str(row.replica_id) != turn.replica_id:
            row.replica_changes += 1
        row.replica_id = turn.replica_id
        row.node_name = nodes[turn.replica_id]
    row.prompt_tokens += turn.prompt_tokens or 0
    row.cached_tokens += turn.cached_tokens or 0
    row.completion_tokens += turn.completion_tokens or 0
    if turn.prompt_tokens is not None:
        row.context_tokens = turn.prompt_tokens + (turn.completion_tokens or 0)
    row.last_ttft_seconds = turn.ttft_seconds
    row.last_outcome = turn.outcome
    row.last_why = turn.why
    mark = _mark(turn)
    row.latest_turns = add_turn(row.latest_turns, mark)
    if turn.replica_id:
        row.stays = add_to_stays(row.stays, mark, nodes.get(turn.replica_id, ""))
    row.last_turn_key = positioned.position
    row.last_turn_at = max(
        row.last_turn_at, datetime.fromtimestamp(turn.started_at_seconds + turn.duration_seconds, tz=UTC)
    )


def _mark(turn: TurnRecord) -> TurnMark:
    return TurnMark(
        at_seconds=turn.started_at_seconds,
        duration_seconds=turn.duration_seconds,
        ttft_seconds=turn.ttft_seconds,
        replica_id=turn.replica_id,
        why=turn.why,
        outcome=turn.outcome,
        prompt_tokens=turn.prompt_tokens,
        cached_tokens=turn.cached_tokens,
        completion_tokens=turn.completion_tokens,
        attempts=turn.attempts,
        continued_from=turn.continued_from,
    )


def _nodes_of(replica_ids: set[str]) -> dict[str, str]:
    """Node name of each replica that is recorded."""
    rows = Replica.objects.filter(pk__in=replica_ids).values_list("pk", "node__name")
    return {str(pk): name or "" for pk, name in rows}


def _order(position: str) -> tuple[int, int]:
    """Stream positions are `<milliseconds>-<number>` and compare as numbers."""
    milliseconds, _, number = position.partition("-")
    return (int(milliseconds or 0), int(number or 0))
