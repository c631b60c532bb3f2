"""Takes reports in: writes first, acknowledges after, and writes only what changed.

Of several heartbeats of one node in a batch only the newest counts, since each carries the whole
state. One report that cannot be recorded is logged and left out; the others go on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import DatabaseError, InterfaceError, OperationalError

from exaserve_ops.controllers.fleet_state import FleetState, NodeView, fingerprint
from exaserve_ops.controllers.loop import KeyQueue
from exaserve_ops.controllers.ports import AgentLink, LivePublisher, ReportSource
from exaserve_ops.health.services import grant_lease
from exaserve_ops.inventory.domain.leftovers import is_end_wish
from exaserve_ops.inventory.domain.liveness import DEAD
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import record_degradation, record_hello
from exaserve_ops.inventory.services.leftovers import record_process_end
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.kv_pools import is_limits_wish
from exaserve_ops.serving.domain.observed import ObservedReplica
from exaserve_ops.serving.domain.reports import (
    CommandOutcome,
    FindingsPart,
    HeartbeatReport,
    HelloReport,
    LogLines,
    Received,
    Report,
    SessionSending,
)
from exaserve_ops.serving.selectors.logs import log_number
from exaserve_ops.serving.services.imports import take_findings_part
from exaserve_ops.serving.services.kv_pools import record_kv_limits
from exaserve_ops.serving.services.observations import record_observations
from exaserve_ops.sessions.domain.moves import Sent, is_move_command, parse_move_command
from exaserve_ops.sessions.services.relocations import record_sent

_log = logging.getLogger(__name__)

BATCH_REPORTS = 4_096
"""Of what piled up only the newest report of a node costs more than reading: a long read catches up."""
RECORD_SECONDS = 0.5
"""Of writing down, between two reads."""
HELLO_PAUSE_SECONDS = 5.0
FORGET_AGAIN_SECONDS = 5.0
"""An agent without a lease introduces itself every three seconds, unasked."""
INTAKE_STALE_SECONDS = 45.0
"""The wish is sent again every 15 s: an intake that saw none of three stands still."""
RECONCILE_STALE_SECONDS = 15.0


class Ingest:
    """The one reader of reports while this controller leads."""

    def __init__(
        self,
        source: ReportSource,
        link: AgentLink,
        publisher: LivePublisher,
        state: FleetState,
        queue: KeyQueue,
        *,
        block_seconds: float = 0.5,
    ) -> None:
        self._source = source
        self._link = link
        self._publisher = publisher
        self._state = state
        self._queue = queue
        self._block_seconds = block_seconds
        self.last_read_seconds = self._read_before_seconds = time.monotonic()
        self._unrecorded: dict[str, None] = {}
        """Nodes whose newest heartbeat was not compared with the record yet, in the order of their turn."""

    def step(self) -> None:
        """Read one batch and record it."""
        block_seconds = 0.001 if self._unrecorded else self._block_seconds
        self._read_before_seconds = self.last_read_seconds
        batch = self._source.read(limit=BATCH_REPORTS, block_seconds=block_seconds)
        self.last_read_seconds = time.monotonic()
        # All of them count as signs of life before the first is recorded: a slow or absent Postgres
        # must not make the later ones look silent.
        self._hear(batch)
        for report in _newest(batch):
            self._record(report)
        self._record_nodes(time.monotonic() + RECORD_SECONDS)
        self._source.acknowledge([received.position for received in batch])

    def _record_nodes(self, deadline: float) -> None:
        """Write down what changed on nodes, those that waited longest first, until time is up.

        What is left waits for the next step: reports must be read on, or nodes that are well look dead.
        """
        while self._unrecorded and time.monotonic() < deadline:
            node_id = next(iter(self._unrecorded))
            view = self._state.node(node_id)
            if view.heartbeat is not None:
                with _left_out_if_bad("heartbeat"):
                    self._record_replicas(view, view.heartbeat, clock.now())
                    self._record_degradation(view, view.heartbeat, clock.now())
            # Only now: where the store was away, the node is looked at again.
            self._unrecorded.pop(node_id)

    def _hear(self, batch: Sequence[Received]) -> None:
        """Take note of who said something, and when it arrived rather than when it was read.

        What was not there at the read before came since: however odd the store's clock, the moment is
        wrong by no more than lies between two reads.
        """
        read_at, unix_seconds = self.last_read_seconds, clock.unix_seconds()
        longest = read_at - self._read_before_seconds
        with self._state.lock:
            for received in batch:
                report, age = received.report, min(received.age_seconds, longest)
                view = self._state.node(report.node_id)
                if isinstance(report, HeartbeatReport):
                    view.hear_heartbeat(report.boot_id, report.sequence, read_at - age)
                view.hear(read_at - age, unix_seconds - age)

    def _record(self, report: Report) -> None:
        with _left_out_if_bad(type(report).__name__):
            match report:
                case HeartbeatReport():
                    self._take_heartbeat(report, clock.now())
                case HelloReport():
                    self._take_hello(report, clock.now())
                case CommandOutcome():
                    _log_outcome(report)
                    _record_outcome(report, clock.now())
                case SessionSending():
                    _record_sending(report, clock.now())
                case FindingsPart():
                    take_findings_part(report)
                case LogLines():
                    self._append_log(report)

    def _append_log(self, lines: LogLines) -> None:
        """Pass lines on as those of the member that runs on this node, whatever it says of others."""
        number = log_number(UUID(lines.replica_id), UUID(lines.node_id))
        if number is None:
            _log.info("event=log_of_none_of_its_replicas node=%s", lines.node_id)
            return
        self._publisher.append_log(lines, number)

    def _take_hello(self, hello: HelloReport, now: datetime) -> None:
        view = self._state.node(hello.node_id)
        if view.lease_epoch and view.introduced == hello.facts:
            # Said again, as while its lease was on the way: nothing to write down, only to repeat.
            view.wish_sent_seconds = -1e9
            self._queue.add("canary", hello.node_id)
            return
        node = record_hello(UUID(hello.node_id), hello.facts, now=now)
        lease = grant_lease(node.pk, boot_id=hello.facts.boot_id, renew=False, now=now)
        with self._state.lock:
            view.name, view.lease_epoch, view.boot_id = node.name, lease.epoch, lease.boot_id
            view.introduced = hello.facts
            view.recorded.clear()
            view.wish_sent_seconds = -1e9
        self._queue.add("node", hello.node_id)

    def _take_heartbeat(self, beat: HeartbeatReport, now: datetime) -> None:
        view = self._state.node(beat.node_id)
        with self._state.lock:
            view.clock_skew_seconds = beat.sent_at_seconds - now.timestamp()
            current = (beat.lease_epoch, beat.boot_id) == (view.lease_epoch, view.boot_id)
            if not current or not view.lease_epoch:
                self._ask_for_hello(view, beat)
                return
            known = view.heartbeat
            # Each run of an agent counts from the start: numbers of two runs do not compare.
            if known is not None and known.boot_id == beat.boot_id and beat.sequence <= known.sequence:
                return
            view.sequence, view.heartbeat = beat.sequence, beat
        self._unrecorded.setdefault(beat.node_id)

    def _ask_for_hello(self, view: NodeView, beat: HeartbeatReport) -> None:
        """A lease that is not this one's: whatever it reports counts for life, and for nothing else."""
        at = time.monotonic()
        # A dead node is not asked: it gets its new lease with its wish, once it is alive again.
        if view.liveness == DEAD or at - view.hello_asked_seconds < HELLO_PAUSE_SECONDS:
            return
        view.hello_asked_seconds = at
        reason = f"lease epoch {beat.lease_epoch} is not {view.lease_epoch}"
        self._link.request_hello(view.node_id, lease_epoch=view.lease_epoch, reason=reason)

    def _record_replicas(self, view: NodeView, beat: HeartbeatReport, now: datetime) -> None:
        marks = {seen.replica_id: fingerprint(seen) for seen in beat.replicas}
        changed = [s for s in beat.replicas if view.recorded.get(s.replica_id) != marks[s.replica_id]]
        if changed:
            self._record_changed(view, changed, now)
            view.recorded.update((seen.replica_id, marks[seen.replica_id]) for seen in changed)
        for replica_id in view.recorded.keys() - marks.keys():
            del view.recorded[replica_id]
        self._forget_ended(view, marks.keys(), time.monotonic())

    def _forget_ended(self, view: NodeView, reported: Collection[str], now: float) -> None:
        """Say of each replica whose end is recorded that it may be forgotten, until it is.

        Once would not do: an agent keeps what its wish still names, and the wish without it comes later.
        """
        view.ended = {key: due for key, due in view.ended.items() if key in reported}
        due = [key for key, due_at in view.ended.items() if due_at <= now]
        if due:
            self._link.forget(view.node_id, lease_epoch=view.lease_epoch, replica_ids=due)
            view.ended.update(dict.fromkeys(due, now + FORGET_AGAIN_SECONDS))

    def _record_changed(self, view: NodeView, changed: Sequence[ObservedReplica], now: datetime) -> None:
        actor = f"agent:{view.name}"
        try:
            rows = record_observations(changed, node_id=UUID(view.node_id), actor=actor, now=now)
        except (OperationalError, InterfaceError):
            raise
        except (DatabaseError, ValidationError, ValueError):
            if len(changed) == 1:
                _log.exception("event=sighting_not_recorded replica=%s", changed[0].replica_id)
                return
            # One that cannot be recorded must not keep the others from being.
            for seen in changed:
                self._record_changed(view, [seen], now)
            return
        over = {replica_id for replica_id, row in rows.items() if row is None or row.status == "stopped"}
        ended = [s.replica_id for s in changed if s.state == "stopped" and s.replica_id in over]
        for replica_id in ended:
            view.ended.setdefault(replica_id, 0.0)

    def _record_degradation(self, view: NodeView, beat: HeartbeatReport, now: datetime) -> None:
        intake = (beat.intake_age_seconds or 0.0) > INTAKE_STALE_SECONDS
        reconcile = (beat.reconcile_age_seconds or 0.0) > RECONCILE_STALE_SECONDS
        unknown = tuple(
            sorted((int(p.get("pid", 0)), bool(p.get("left_over"))) for p in beat.unknown_processes)
        )
        mark = (beat.reconcile_error, intake, reconcile, unknown)
        if mark == view.degraded:
            return
        reasons = [
            *(["the agent takes no commands in"] if intake else []),
            *([f"the agent's launch loop stands still {beat.reconcile_error}"] if reconcile else []),
            *([f"{len(unknown)} unknown processes"] if unknown else []),
        ]
        record_degradation(
            UUID(view.node_id),
            reason="; ".join(reasons),
            commands_stale_since=now if intake else None,
            reconcile_stale_since=now if reconcile else None,
            unknown_processes=beat.unknown_processes,
            now=now,
        )
        view.degraded = mark


@contextlib.contextmanager
def _left_out_if_bad(kind: str) -> Iterator[None]:
    """Log a report that cannot be recorded; the others go on. Raises where the store is away."""
    try:
        yield
    except (OperationalError, InterfaceError):
        raise  # the batch comes again
    except (DatabaseError, Node.DoesNotExist, ValidationError, ValueError):
        _log.exception("event=report_not_recorded kind=%s", kind)


def _newest(batch: Sequence[Received]) -> list[Report]:
    """Drop heartbeats and introductions that a later one of the same node and agent run makes needless."""
    last: dict[tuple[str, ...], int] = {}
    for index, received in enumerate(batch):
        last[_sameness(received.report, index)] = index
    kept = set(last.values())
    return [received.report for index, received in enumerate(batch) if index in kept]


def _sameness(report: Report, index: int) -> tuple[str, ...]:
    """Equal for reports of which only the last counts."""
    match report:
        case HeartbeatReport():
            return ("heartbeat", report.node_id, report.boot_id)
        case HelloReport():
            return ("hello", report.node_id, report.facts.boot_id)
        case _:
            return (str(index),)


def _record_outcome(outcome: CommandOutcome, now: datetime) -> None:
    """Write down what became of a command that a person waits for."""
    node_id, done = UUID(outcome.node_id), outcome.outcome == "done"
    if is_end_wish(outcome.command_id):
        record_process_end(outcome.command_id, node_id=node_id, done=done, reason=outcome.reason, now=now)
    elif is_limits_wish(outcome.command_id):
        record_kv_limits(outcome.command_id, node_id=node_id, done=done, reason=outcome.reason, now=now)
    elif is_move_command(outcome.command_id) and not done:
        refused = Sent(outcome.outcome, outcome.reason)
        record_sent(parse_move_command(outcome.command_id), refused, node_id=node_id, now=now)


def _record_sending(report: SessionSending, now: datetime) -> None:
    sent = Sent(
        report.code,
        report.reason,
        report.sent_bytes,
        report.target_tokens,
        report.seconds,
        report.turn_began,
        report.carrier,
    )
    record_sent(parse_move_command(report.command_id), sent, node_id=UUID(report.node_id), now=now)


def _log_outcome(outcome: CommandOutcome) -> None:
    if outcome.outcome != "done":
        _log.warning(
            "event=command_%s node=%s command=%s reason=%s",
            outcome.outcome,
            outcome.node_id,
            outcome.command_id,
            outcome.reason,
        )
