"""Writes finished requests into their sessions, behind the requests and in batches."""

from __future__ import annotations

from exaserve_ops.controllers.live import LiveBuilder
from exaserve_ops.controllers.node_rollups import NodeRollupRecorder
from exaserve_ops.controllers.ports import TurnSource
from exaserve_ops.rollouts.services.answers import count_answers
from exaserve_ops.sessions.services import PositionedTurn, record_turns
from exaserve_ops.telemetry.domain.windows import FinishedRequest


class TurnRecorder:
    """The loop between gateways' turn log and the sessions table."""

    def __init__(self, source: TurnSource, live: LiveBuilder, nodes: NodeRollupRecorder) -> None:
        self._source = source
        self._live = live
        self._nodes = nodes

    def step(self) -> None:
        """Record one batch."""
        batch = self._source.read(1.0)
        if not batch:
            return
        turns = [PositionedTurn(position, turn) for position, turn in batch]
        count_answers(turns)
        record_turns(turns)
        self._source.ack([position for position, _ in batch])
        for _, turn in batch:
            self._nodes.count_answer(turn.replica_id, turn.ttft_seconds)
            self._live.count_request(
                FinishedRequest(
                    ended_at_seconds=turn.started_at_seconds + turn.duration_seconds,
                    ttft_seconds=turn.ttft_seconds,
                    tokens=turn.completion_tokens or 0,
                    repinned=turn.why == "repinned" or bool(turn.session_id and turn.continued_from),
                )
            )
