"""The loop of one simulating process: one thread, a heap of what is due, and the store."""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import threading
import time
from pathlib import Path

from workers.simulation.config import SimulationConfig
from workers.simulation.engine import Traffic
from workers.simulation.faults import FaultScriptError
from workers.simulation.fleet import SimulatedFleet
from workers.simulation.identity import PORTS_PER_SLOT
from workers.simulation.journal import FaultInbox, FaultJournal
from workers.simulation.node import NodeShape
from workers.simulation.serve import EngineServer
from workers.simulation.wire import CommandReader, ReportWriter

_LEAST_PAUSE_SECONDS = 0.01
"""What is due within a pause leaves together: a batch costs little more than a single report."""
_LONGEST_PAUSE_SECONDS = 0.1

logger = logging.getLogger(__name__)


class Simulation:
    """One process's share of the fleet. `lock` guards `fleet` against the thread that serves HTTP."""

    def __init__(self, config: SimulationConfig) -> None:
        now = time.monotonic()
        self.lock = threading.Lock()
        self.fleet = SimulatedFleet(
            config.nodes,
            shape=NodeShape(
                slots=config.slots,
                cut_cards=config.cut_cards,
                first_port=config.first_port,
                traffic=Traffic(requests_per_second=config.requests_per_second),
                stamp_queue=config.stamp_queue,
            ),
            seed=config.seed,
            run_id=secrets.token_hex(8),
            faults=config.faults,
            places=config.places,
            now=now,
            wall_offset_seconds=_wall_clock_seconds() - now,
        )
        self._writer = ReportWriter(config.redis_url)
        self._reader = CommandReader(config.redis_url, [n.node_id for n in config.nodes], self._take)
        places = config.slots + config.cut_cards.slices
        ports = range(config.first_port, config.first_port + PORTS_PER_SLOT * places)
        self._server = EngineServer(self.fleet, self.lock, ports) if config.serve else None
        self._journal = FaultJournal(Path(config.fault_journal)) if config.fault_journal else None
        self._inbox = FaultInbox(Path(config.fault_inbox)) if config.fault_inbox else None
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Let `run` return."""
        self._stopping.set()

    def run(self) -> None:
        """Simulate until stopped. Raises `OSError` where the ports cannot be listened on."""
        parent = os.getppid()
        if self._server is not None:
            self._server.start()
        while not self._stopping.is_set() and os.getppid() == parent:
            try:
                self._step()
            except Exception:  # top of the loop: one odd message must not end a thousand nodes
                logger.exception("a step of the simulation failed")
                self._stopping.wait(_LONGEST_PAUSE_SECONDS)
        if self._server is not None:
            self._server.stop()
        self._reader.close()
        self._writer.close()

    def _step(self) -> None:
        self._add_faults()
        with self.lock:
            reports = self.fleet.step(time.monotonic())
            pulses = self.fleet.take_pulses()
            notes = self.fleet.take_notes()
        if self._journal is not None:
            self._journal.write(notes)
        if not self._writer.send(reports, pulses):
            with self.lock:
                self.fleet.lost_contact()
        pause = self.fleet.next_due_seconds() - time.monotonic()
        self._reader.drain(min(_LONGEST_PAUSE_SECONDS, max(_LEAST_PAUSE_SECONDS, pause)))

    def _add_faults(self) -> None:
        for fault in self._inbox.take() if self._inbox is not None else ():
            try:
                with self.lock:
                    self.fleet.add_fault(fault, time.monotonic())
            except FaultScriptError as error:
                logger.warning("no fault: %s", error)

    def _take(self, node_id: str, data: bytes) -> None:
        with self.lock:
            self.fleet.take(node_id, data, time.monotonic())


def _wall_clock_seconds() -> float:
    """The host's wall clock, of which every simulated node's clock is a copy."""
    return datetime.datetime.now(tz=datetime.UTC).timestamp()  # noqa: TID251 - the one place, see above
