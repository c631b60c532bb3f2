"""Turning a snapshot and its plan into what the heartbeat says of each replica."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from workers.agent import processes
from workers.agent.journal import AttemptRow, ReplicaRow
from workers.agent.probing import ProbeState
from workers.agent.snapshot import Snapshot
from workers.agent.supervisor import Decision
from workers.engines.windows import choose_span, measure_window
from workers.protocol.engines.sleeping import AWAKE
from workers.protocol.observed import ExitInfo, ObservedState, ReplicaObserved, ReplicaTelemetry

_TAIL_SENT_SECONDS = 60.0
_STATES_WITH_TAIL = (ObservedState.BACKING_OFF, ObservedState.FAILED)


def observe(snapshot: Snapshot, decisions: Iterable[Decision], *, now: float) -> tuple[ReplicaObserved, ...]:
    """Describe every replica: one entry for each decision."""
    return tuple(_observe_one(snapshot, decision, now) for decision in decisions)


def _observe_one(snapshot: Snapshot, decision: Decision, now: float) -> ReplicaObserved:
    replica_id = decision.replica_id
    row = snapshot.rows.get(replica_id) or ReplicaRow(replica_id=replica_id)
    spec = snapshot.specs.get(replica_id)
    known = ReplicaObserved(
        replica_id=replica_id,
        generation=spec.generation if spec else row.generation,
        state=decision.state,
        attempt=row.last_attempt,
        restarts=row.restarts,
        reason=decision.reason,
        retry_in_seconds=decision.retry_in_seconds,
        last_exit=_last_exit(row, decision.state, now),
        stalled=decision.stalled,
        held_by_pids=decision.held_by_pids,
        memory_wait=decision.memory_wait,
        member_number=spec.member.number if spec is not None and spec.member is not None else 0,
        epoch=spec.member.epoch if spec is not None and spec.member is not None else row.epoch,
    )
    attempt = snapshot.attempts.get(replica_id)
    if attempt is None:
        return known
    probe = snapshot.probes[replica_id]
    return msgspec.structs.replace(
        known,
        attempt=attempt.attempt,
        pid=processes.read_engine_pid(Path(attempt.runtime_dir)) or attempt.pid,
        address=_address(attempt),
        ports=attempt.ports,
        uptime_seconds=max(0.0, now - attempt.launched_at),
        start_took_seconds=_start_took(attempt, probe),
        active_requests=probe.active_requests,
        telemetry=_telemetry(probe, now),
        sleep_state=attempt.sleep_state,
        sleep_note=_sleep_note(snapshot, replica_id),
        woke_in_seconds=attempt.woke_in,
        member_number=attempt.member_number,
        epoch=attempt.epoch,
        rendezvous="" if attempt.head_address else attempt.rendezvous,
    )


def _sleep_note(snapshot: Snapshot, replica_id: str) -> str:
    """Why a ready one is awake though it is to sleep."""
    spec = snapshot.specs.get(replica_id)
    attempt = next((f.attempt for f in snapshot.facts if f.replica_id == replica_id), None)
    if spec is None or not spec.asleep or attempt is None or attempt.ready_at_seconds is None:
        return ""
    return attempt.sleep.hindrance if attempt.sleep.state == AWAKE else ""


def _address(attempt: AttemptRow) -> str:
    """Where it answers; a member other than the head does nowhere."""
    if attempt.head_address:
        return ""
    host = f"[{attempt.host}]" if ":" in attempt.host else attempt.host
    return f"{host}:{attempt.ports[0]}" if attempt.ports else ""


def _start_took(attempt: AttemptRow, probe: ProbeState) -> float | None:
    ready_at = attempt.ready_at if attempt.ready_at is not None else probe.ready_at_seconds
    return None if ready_at is None else max(0.0, ready_at - attempt.launched_at)


def _last_exit(row: ReplicaRow, state: ObservedState, now: float) -> ExitInfo | None:
    """The last exit; its log lines only while they are news, to keep the heartbeat small."""
    last = row.last_exit
    if last is None:
        return None
    is_news = row.last_ended_at is not None and now - row.last_ended_at < _TAIL_SENT_SECONDS
    return ExitInfo(
        attempt=last.attempt,
        code=last.code,
        signal=last.signal,
        duration_seconds=last.duration_seconds,
        log_tail=last.log_tail if is_news or state in _STATES_WITH_TAIL else (),
        why=last.why,
    )


def _telemetry(probe: ProbeState, now: float) -> ReplicaTelemetry | None:
    """Load over the window that the kept samples span; without any, only what was odd."""
    notes = (probe.note,) if probe.note else ()
    if not probe.samples:
        return ReplicaTelemetry(window_seconds=0.0, notes=notes) if notes else None
    span = choose_span(probe.samples)
    if span.note:
        notes = (span.note, *notes)
    newest_at, _ = probe.samples[-1]
    report = measure_window(span.old, span.new, seconds=span.seconds, age_seconds=max(0.0, now - newest_at))
    return msgspec.structs.replace(report, notes=(*report.notes, *notes))
