"""Moves of conversations: asking for them, and recording how they go."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import F

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.serving.models import Replica
from exaserve_ops.sessions.domain.moves import BETWEEN, COMPUTED, PLANNED, RELOCATION, WITHOUT_KV, Sent
from exaserve_ops.sessions.domain.relocation import BALANCE, PREFILL, RECOMPUTE
from exaserve_ops.sessions.domain.relocation import Relocation as PlannedMove
from exaserve_ops.sessions.models import InferenceSession, Relocation
from exaserve_ops.sessions.selectors.moves import best_target, takes_sessions

_REASON_CHARACTERS = 500
_CARRIER_CHARACTERS = 16


def ask_move(
    session_pk: int, target_id: UUID | None, *, reason: str, actor: str, now: datetime
) -> Relocation:
    """Ask for a move, to the emptiest other replica of its deployment where no target is named.

    Raises `ConflictError` where it has no place now, moves already, or the target cannot have it.
    """
    session = InferenceSession.objects.select_related("replica").get(pk=session_pk)
    source = session.replica
    if source is None:
        raise ConflictError("the session has no replica on record: its next turn chooses one anyway")
    target = best_target(source, now=now) if target_id is None else _named_target(source, target_id)
    if target is None:
        raise ConflictError("no other replica of its deployment takes conversations now")
    with transaction.atomic():
        row = Relocation(session=session, source=source, target=target, why=reason, asked_by=actor)
        return _create(row, actor=actor, now=now)


def _named_target(source: Replica, target_id: UUID) -> Replica:
    target = Replica.objects.select_related("node").filter(pk=target_id).first()
    if target is None:
        raise ConflictError("there is no such replica")
    if target.deployment_id != source.deployment_id:
        raise ConflictError("that replica is of another deployment")
    if target.pk == source.pk:
        raise ConflictError("it is there already")
    if not takes_sessions(target):
        raise ConflictError(f"{target.name} takes no conversations now")
    return target


def plan_move(move: PlannedMove, *, actor: str, now: datetime) -> Relocation:
    """Record a move that a plan chose. Raises `ConflictError` where the session moves already or is gone."""
    with transaction.atomic():
        session = InferenceSession.objects.filter(pk=move.session_id).first()
        found = Replica.objects.in_bulk([move.source_id, move.target_id])
        source, target = found.get(UUID(move.source_id)), found.get(UUID(move.target_id))
        if session is None or source is None or target is None:
            raise ConflictError("what was to move is gone")
        row = Relocation(session=session, source=source, target=target, why=move.why, trigger=move.trigger)
        return _create(row, actor=actor, now=now)


def _create(row: Relocation, *, actor: str, now: datetime) -> Relocation:
    row.why, row.asked_by = row.why[:_REASON_CHARACTERS], row.asked_by[:120]
    row.created_at = row.status_changed_at = now
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError:
        raise ConflictError("the session is on its way already") from None
    event = "move_asked" if row.asked_by else "move_planned"
    told = f"from {row.source} to {row.target}: {row.why}"
    record_event(_subject_of(row.session), event, actor=actor, now=now, moved=("", row.status), reason=told)
    return row


@transaction.atomic
def advance_relocation(
    relocation_id: UUID, event: str, *, reason: str, actor: str, now: datetime, **facts: int | float | str
) -> Relocation:
    """Move on by one event, under the row's lock, with what became known. Raises `IllegalTransitionError`."""
    row = Relocation.objects.select_for_update(of=("self",)).select_related("session").get(pk=relocation_id)
    before, row.status = row.status, RELOCATION.next(row.status, event)
    row.reason = reason[:_REASON_CHARACTERS]
    row.status_changed_at = now
    if row.status in RELOCATION.final:
        row.ended_at = now
    for name, value in facts.items():
        setattr(row, name, value)
    row.save(update_fields=["status", "reason", "status_changed_at", "ended_at", *facts])
    if event == "repinned":
        _note_place(row)
    record_event(
        _subject_of(row.session),
        f"move_{event}",
        actor=actor,
        now=now,
        moved=(before, row.status),
        reason=reason,
    )
    return row


def _note_place(row: Relocation) -> None:
    """Say at once where it is now: until its next turn nobody else would, and plans go by it."""
    target = row.target
    if target is not None and target.node is not None:
        InferenceSession.objects.filter(pk=row.session_id, replica=row.source_id).update(
            replica=target, node_name=target.node.name, replica_changes=F("replica_changes") + 1
        )


def note_wait(relocation_id: UUID, why: str) -> None:
    """Say what a move that has not begun waits for."""
    rows = Relocation.objects.filter(pk=relocation_id, status=PLANNED)
    rows.update(reason=why[:_REASON_CHARACTERS])


def record_sent(relocation_id: UUID, sent: Sent, *, node_id: UUID, now: datetime) -> None:
    """Take in what the source's agent says; what comes too late or from another node is passed over."""
    row = Relocation.objects.select_related("source__node").filter(pk=relocation_id).first()
    if row is None or row.source is None or row.source.node_id != node_id:
        return
    actor = f"agent:{row.source.node}"
    event, reason, facts = _meaning(sent, row.trigger, row.way)
    try:
        advance_relocation(relocation_id, event, reason=reason, actor=actor, now=now, **facts)
    except IllegalTransitionError:
        return


def _meaning(sent: Sent, trigger: str, way: str) -> tuple[str, str, dict[str, int | float | str]]:
    """Event, reason and facts of what came of sending."""
    if sent.code:
        return _unsent(sent, trigger, way)
    computed = sent.carrier == COMPUTED
    facts: dict[str, int | float | str] = {
        "sent_bytes": sent.sent_bytes,
        "target_tokens": sent.target_tokens,
        "send_seconds": sent.seconds,
        "carrier": sent.carrier[:_CARRIER_CHARACTERS],
    }
    if computed:
        facts["way"] = PREFILL
    if sent.turn_began:
        return "drop", "a turn began meanwhile", facts
    said = f"{sent.target_tokens} tokens {'were computed' if computed else 'are'} there"
    return "arrived", f"{said}: {sent.reason}" if sent.reason else said, facts


def _unsent(sent: Sent, trigger: str, way: str) -> tuple[str, str, dict[str, int | float | str]]:
    """The same where the target has nothing more than before."""
    told = f"{sent.code}: {sent.reason}" if sent.reason else sent.code
    if sent.code in WITHOUT_KV:
        why = f"there is no KV to send: {sent.reason or sent.code}"
        if trigger == BALANCE:
            return "drop", f"{why}, and to compute it again elsewhere is not worth it", {}
        return "skip_sending", why, {"way": RECOMPUTE}
    if sent.code in BETWEEN:
        return "drop", told, {}
    if way == PREFILL:
        return "skip_sending", f"the target could not compute it before: {told}", {"way": RECOMPUTE}
    return "fail", told, {}


def delete_relocations_before(moment: datetime) -> int:
    """Forget moves that ended before that."""
    return Relocation.objects.filter(ended_at__lt=moment).delete()[0]


def _subject_of(session: InferenceSession) -> Subject:
    return Subject("session", str(session.pk), session.session_id)
