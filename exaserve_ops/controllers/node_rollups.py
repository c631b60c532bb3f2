"""Keeps a minute of samples of each node's machine and writes it down when the minute is over."""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import datetime
from uuid import UUID

from exaserve_ops.controllers.fleet_state import FleetState, NodeView
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.gang_rules import HEAD
from exaserve_ops.telemetry.domain.node_minutes import NodeSamples
from exaserve_ops.telemetry.services import record_node_minutes

SILENT_SECONDS = 15.0
"""What a node said longer ago is no sample of now."""
_MOST_ANSWERS_BETWEEN_STEPS = 100_000


class NodeRollupRecorder:
    """What is in mind of the running minute is lost with the leader: one gap in a chart."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._minute = _minute_of(clock.now())
        self._samples: defaultdict[str, NodeSamples] = defaultdict(NodeSamples)
        # Filled by the thread that reads turns, which must not wait for this one.
        self._answers: deque[tuple[str, float]] = deque(maxlen=_MOST_ANSWERS_BETWEEN_STEPS)

    def count_answer(self, replica_id: str, ttft_seconds: float | None) -> None:
        """Take in one finished request; from any thread. It counts in the minute in which it is known."""
        if ttft_seconds is not None:
            self._answers.append((replica_id, ttft_seconds))

    def step(self) -> None:
        """Take one sample of every node that speaks; write the last minute down if it is over."""
        now = clock.now()
        if _minute_of(now) != self._minute:
            done, self._samples = self._samples, defaultdict(NodeSamples)
            finished, self._minute = self._minute, _minute_of(now)
            record_node_minutes(finished, {UUID(key): s.summarise() for key, s in done.items()})
        nodes_of: dict[str, str] = {}
        for view in self._state.nodes():
            self._sample(view, now.timestamp(), nodes_of)
        for _ in range(len(self._answers)):
            replica_id, ttft_seconds = self._answers.popleft()
            node_id = nodes_of.get(replica_id)
            if node_id is not None:
                self._samples[node_id].add_answer(ttft_seconds)

    def _sample(self, view: NodeView, now_unix_seconds: float, nodes_of: dict[str, str]) -> None:
        beat, heard = view.heartbeat, view.last_report_unix_seconds
        if beat is None or heard is None or now_unix_seconds - heard > SILENT_SECONDS:
            return
        loads = []
        for seen in beat.replicas:
            if seen.member_number == HEAD:  # that of one on a single node has the number 0, too
                nodes_of[seen.replica_id] = view.node_id
            if seen.load is not None:
                loads.append(seen.load)
        samples = self._samples[view.node_id]
        samples.add_requests(
            [load.requests_running for load in loads], [load.requests_waiting for load in loads]
        )
        samples.add_engine_ttfts(
            [load.ttft_p50_seconds for load in loads], [load.ttft_p99_seconds for load in loads]
        )
        if beat.host is not None:
            samples.add_host(beat.host)
        samples.add_cards(beat.accelerator_loads)


def _minute_of(moment: datetime) -> datetime:
    return moment.replace(second=0, microsecond=0)
