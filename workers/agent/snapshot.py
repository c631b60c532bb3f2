"""The facts that the plan is made from: journal, process table and probes put side by side."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from workers.agent import logs, processes
from workers.agent.facts import (
    AttemptFacts,
    HeldMemory,
    ModelCheck,
    Probe,
    ReplicaFacts,
)
from workers.agent.journal import AttemptRow, Journal, ReplicaRow, Wish
from workers.agent.model_files import ModelVerifier
from workers.agent.probing import ProbeState
from workers.agent.processes import ExitRecord, LaunchLabel, ProcessId
from workers.agent.scraper import Scraper
from workers.agent.sleep_requests import SleepRequests
from workers.agent.sleep_sight import SleepSight
from workers.kv.hoards import AttemptKey
from workers.protocol.wish import ReplicaSpec

Hoarding = Callable[[AttemptKey], float]
"""For how long an attempt has kept KV blocks that others are guaranteed, in seconds."""

_HOARDS = "it keeps KV blocks that other replicas are guaranteed and wait for"
_LINES_TO_JUDGE = 40
_JUDGED_WIDTH = 1000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of the node."""

    wish: Wish | None
    specs: Mapping[str, ReplicaSpec]
    rows: Mapping[str, ReplicaRow]
    attempts: Mapping[str, AttemptRow]
    probes: Mapping[str, ProbeState]
    facts: tuple[ReplicaFacts, ...]


class Observer:
    """Takes snapshots of one node."""

    def __init__(
        self,
        node_id: str,
        journal: Journal,
        scraper: Scraper,
        verifier: ModelVerifier,
        held: HeldMemory = lambda _spec: None,
        *,
        memory_notes: Mapping[str, str] = MappingProxyType({}),
        sleep: SleepSight | None = None,
    ) -> None:
        """Look at one node. `memory_notes` fills as `held` is asked: see `ReplicaFacts.memory_note`."""
        self._sleep = sleep or SleepSight(SleepRequests(), {})
        self._node_id = node_id
        self._held = held
        self._memory_notes = memory_notes
        self._journal = journal
        self._scraper = scraper
        self._verifier = verifier

    def take(self, strays: Mapping[str, tuple[int, ...]], hoarding: Hoarding = lambda _key: 0.0) -> Snapshot:
        """Look at everything once. `strays`: pids of unknown processes by replica id."""
        wish = self._journal.wish()
        specs = {spec.replica_id: spec for spec in wish.specs} if wish else {}
        rows = {row.replica_id: row for row in self._journal.replicas()}
        attempts = {row.replica_id: self._adopt(row) for row in self._journal.attempts()}
        probes = {key: self._probe(row) for key, row in attempts.items()}
        facts = []
        for replica_id in sorted(specs.keys() | rows.keys() | attempts.keys()):
            row = rows.get(replica_id) or ReplicaRow(replica_id=replica_id)
            attempt = attempts.get(replica_id)
            facts.append(
                self._replica_facts(
                    row,
                    specs.get(replica_id),
                    None
                    if attempt is None
                    else replace(
                        self._attempt_facts(attempt, probes[replica_id], hoarding(attempt.key)),
                        sleep=self._sleep.facts(attempt, specs.get(replica_id), probes[replica_id]),
                    ),
                    strays.get(replica_id, ()),
                )
            )
        return Snapshot(wish, specs, rows, attempts, probes, tuple(facts))

    def _adopt(self, row: AttemptRow) -> AttemptRow:
        """Find the process of a launch whose pid could not be written down any more."""
        if row.leader is not None:
            return row
        for process in processes.members(None, self._label(row)):
            stat = processes.read_stat(process.pid)
            if stat is not None and stat.session == process.pid:
                self._journal.change_attempt(row.key, pid=process.pid, start_ticks=process.start_ticks)
                return self._reread(row)
        return row

    def _reread(self, row: AttemptRow) -> AttemptRow:
        return next((found for found in self._journal.attempts() if found.key == row.key), row)

    def _probe(self, row: AttemptRow) -> ProbeState:
        """Probe state, whose first success is written down so that an adopted attempt keeps it."""
        state = self._scraper.state(row.key)
        if state.ready_at_seconds is not None and row.ready_at is None:
            self._journal.change_attempt(row.key, ready_at=state.ready_at_seconds)
        return state

    def _replica_facts(
        self,
        row: ReplicaRow,
        spec: ReplicaSpec | None,
        attempt: AttemptFacts | None,
        stray_pids: tuple[int, ...],
    ) -> ReplicaFacts:
        check, reason = ModelCheck.UNKNOWN, ""
        held = None
        if spec is not None and attempt is None:
            check, reason = self._verifier.verdict(spec.model, spec.generation)
            held = self._held(spec)
        return ReplicaFacts(
            replica_id=row.replica_id,
            spec=spec,
            generation=row.generation,
            last_attempt=row.last_attempt,
            epoch=row.epoch,
            crashes=row.crashes,
            port_conflicts=row.port_conflicts,
            last_ended_at_seconds=row.last_ended_at,
            last_exit_text=row.last_exit.why if row.last_exit else "",
            refusal=row.refusal,
            model=check,
            model_reason=reason,
            stray_pids=stray_pids,
            held=held,
            memory_note=self._memory_notes.get(row.replica_id, "") if attempt is None else "",
            last_stalled=row.last_exit.stalled if row.last_exit else False,
            attempt=attempt,
        )

    def _attempt_facts(self, row: AttemptRow, probe: ProbeState, hoarding_seconds: float) -> AttemptFacts:
        ended = processes.read_exit(Path(row.runtime_dir))
        pids = self._living(row, ended)
        ready_at = row.ready_at if row.ready_at is not None else probe.ready_at_seconds
        drained = row.drain_since
        idle = [t for t in probe.idle_times_seconds if drained is not None and t > drained]
        # Whoever gives nothing back for so long does not work on, whatever its counters say.
        hoards = hoarding_seconds > probe.progress.still_seconds
        return AttemptFacts(
            attempt=row.attempt,
            launch_digest=row.launch_digest,
            launched_at_seconds=row.launched_at,
            pids=tuple(process.pid for process in pids),
            started=row.leader is not None,
            engine_ended=ended is not None or (row.leader not in pids and bool(pids)),
            exit_text=exit_text(ended) if ended else "",
            probe=_probe_of(probe, row),
            probe_reason=probe.reason,
            ready_at_seconds=ready_at,
            idle_scrapes=len(idle),
            port_taken=not pids and ready_at is None and self._lost_port(row),
            drain_since_seconds=row.drain_since,
            term_sent_at_seconds=row.term_sent_at,
            kill_sent_at_seconds=row.kill_sent_at,
            stop_reason=row.stop_reason,
            stop_blames_engine=row.stop_blames_engine,
            still_seconds=max(hoarding_seconds, probe.progress.still_seconds),
            still_text=_HOARDS if hoards else probe.progress.still_text,
            has_generated=hoards or probe.progress.has_generated,
            stalled=row.stalled,
            idle_in_a_row=len(probe.idle_times_seconds),
            epoch=row.epoch,
        )

    def _living(self, row: AttemptRow, ended: ExitRecord | None) -> tuple[ProcessId, ...]:
        """Processes of an attempt. While the shim guards a running engine, it stands for all."""
        leader = row.leader
        quiet = ended is None and row.term_sent_at is None
        if leader is not None and quiet and processes.is_alive(leader):
            return (leader,)
        return processes.members(leader, self._label(row))

    def _lost_port(self, row: AttemptRow) -> bool:
        lines = logs.last_lines(Path(row.log_file), count=_LINES_TO_JUDGE, width=_JUDGED_WIDTH, secrets=())
        return logs.tells_port_taken(lines)

    def _label(self, row: AttemptRow) -> LaunchLabel:
        return LaunchLabel(self._node_id, row.replica_id, row.attempt)


def _probe_of(state: ProbeState, row: AttemptRow) -> Probe:
    """An adopted attempt that was ready counts as ready until probes show otherwise."""
    if state.ready_at_seconds is None and row.ready_at is not None:
        return Probe.READY
    return state.probe


def exit_text(record: ExitRecord) -> str:
    """Say in words how an engine ended, such as `killed by SIGKILL after 3.2 s`."""
    after = f"after {record.duration_seconds:.1f} s"
    if record.signal is None:
        return f"exit code {record.code} {after}"
    try:
        name = signal.Signals(record.signal).name
    except ValueError:
        name = f"signal {record.signal}"
    return f"killed by {name} {after}"
