"""What is seen of an attempt's sleep: the journal, the request that was sent, and what keeps it awake."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workers.agent.facts import RequestState, SleepFacts
from workers.agent.journal import AttemptRow
from workers.agent.memory_gate import HostMemory, read_host_memory
from workers.agent.probing import ProbeState
from workers.agent.sleep_requests import SleepRequest, SleepRequests
from workers.engines.base import EngineAdapter, Sleeps
from workers.protocol.engines.sleeping import AWAKE, why_no_sleep
from workers.protocol.wish import ReplicaSpec


class SleepSight:
    """Of one node. `adapters`: the engines that it has."""

    def __init__(
        self,
        requests: SleepRequests,
        adapters: Mapping[str, EngineAdapter],
        host_memory: Callable[[], HostMemory | None] = read_host_memory,
    ) -> None:
        self._requests = requests
        self._adapters = adapters
        self._host_memory = host_memory

    def facts(self, row: AttemptRow, spec: ReplicaSpec | None, probe: ProbeState) -> SleepFacts:
        """How an attempt sleeps, or why it does not though it is to."""
        if row.sleep_state == AWAKE:
            hindrance = "" if spec is None or not spec.asleep else row.sleep_note or self.why_awake(spec)
            return SleepFacts(hindrance=hindrance)
        request = self._requests.of(row.key, row.sleep_state) or SleepRequest(
            row.sleep_state, RequestState.NONE
        )
        healthy_at = probe.healthy_at_seconds or 0.0
        return SleepFacts(
            state=row.sleep_state,
            since_seconds=row.sleep_since or 0.0,
            request=request.outcome,
            error=request.error,
            answers_again=request.outcome is RequestState.DONE and healthy_at >= request.done_at_seconds,
        )

    def why_awake(self, spec: ReplicaSpec) -> str:
        """Why a replica that is to sleep stays awake: its weights go to the memory of the host."""
        if why := why_no_sleep(spec.engine, spec.engine_options):
            return why
        if spec.member is not None:
            return "a replica that several nodes run together is not put to sleep"
        adapter = self._adapters.get(spec.engine)
        if adapter is None or not isinstance(adapter, Sleeps) or not adapter.can_sleep(spec.engine_options):
            return "the version of its engine that this node has cannot be put to sleep"
        weights, host = sum(file.size_bytes for file in spec.model.files), self._host_memory()
        if host is None or host.available_bytes >= weights:
            return ""
        # Not how much is free: each change of this text is written down.
        return (
            f"its weights take {weights / 1e9:.1f} GB of the host's memory while it sleeps, and less is free"
        )
