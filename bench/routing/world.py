"""Simulated replicas in virtual time: continuous batching with chunked prefill and a prefix cache.

Every step takes a base time, the time of its prefill tokens, and a little for each sequence that
decodes. Prompts wait first come, first served until their KV fits; blocks of prompts that ended stay in
cache until others need them, least recently used first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """Speeds and sizes of one simulated replica, about those of an 8B model on an 80 GB accelerator."""

    step_seconds: float = 0.008
    prefill_tokens_per_second: float = 16_000.0
    decode_seconds: float = 0.00025
    """Of a step, for each sequence that decodes."""
    step_tokens: int = 2_048
    most_running: int = 128
    kv_blocks: int = 800
    """Of as many tokens as the trace's."""


@dataclass(slots=True, eq=False)
class Job:
    """A request at a replica."""

    request: TraceRequest
    sent_at: float
    cached_tokens: int = 0
    left_to_prefill: int = 0
    emitted: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None
    own_blocks: int = 0
    named: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One replica. Also what a policy sees of it: the fields that a gateway knows."""

    name: str
    model: ReplicaModel
    in_flight: int = 0
    reported_requests: int | None = None
    """Nobody needs to be told: there is one router, which sees all."""
    pending_tokens: float = 0.0
    weight: float = 1.0
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    busy_until: float | None = None
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Block id to the sequences that hold it; the least recently used first."""
    used_at: dict[int, float] = field(default_factory=dict)
    """When each cached block was last asked for."""
    evicted_used_at: float | None = None
    """When the block that was evicted last had been; what was asked for later is still cached."""
    private_blocks: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    served: int = 0

    @property
    def waiting_requests(self) -> int:
        """Requests that are not admitted yet."""
        return len(self.waiting)

    def admit(self, now: float) -> None:
        """Take up what fits."""
        while (
            self.waiting and len(self.running) < self.model.most_running and self._take(self.waiting[0], now)
        ):
            self.running.append(self.waiting.popleft())

    def _take(self, job: Job, now: float) -> bool:
        request = job.request
        full = request.prompt_tokens // request.block_tokens
        named = request.prefix_ids[:full]
        hits = 0
        while hits < len(named) and named[hits] in self.cache:
            hits += 1
        total = -(-(request.prompt_tokens + request.output_tokens) // request.block_tokens)
        own = total - len(set(named))
        new = sum(1 for block in set(named) if block not in self.cache)
        if not self._make_room(own + new, keep=frozenset(named[:hits])) and self.running:
            return False
        for block in named:
            self.cache[block] = self.cache.get(block, 0) + 1
            self.cache.move_to_end(block)
            self.used_at[block] = now
        self.private_blocks += own
        job.own_blocks, job.named = own, named
        job.cached_tokens = min(hits * request.block_tokens, request.prompt_tokens - 1)
        job.left_to_prefill = request.prompt_tokens - job.cached_tokens
        self.prompt_tokens += request.prompt_tokens
        self.hit_tokens += job.cached_tokens
        return True

    def _make_room(self, blocks: int, keep: frozenset[int]) -> bool:
        free = self.model.kv_blocks - self.private_blocks - len(self.cache)
        if free >= blocks:
            return True
        idle = [block for block, holders in self.cache.items() if not holders and block not in keep]
        for block in idle[: blocks - free]:
            del self.cache[block]
            self.evicted_used_at = self.used_at.pop(block)
        return free + len(idle) >= blocks

    def release(self, job: Job) -> None:
        """Let a finished sequence go; its prompt stays in cache."""
        self.private_blocks -= job.own_blocks
        for block in job.named:
            self.cache[block] -= 1

    def plan_step(self) -> tuple[float, list[tuple[Job, int]], list[Job], int]:
        """Return seconds, prefill chunks, who decodes, and how many equal steps may be taken at once."""
        decoding = [job for job in self.running if not job.left_to_prefill]
        budget = self.model.step_tokens - len(decoding)
        chunks: list[tuple[Job, int]] = []
        for job in self.running:
            if job.left_to_prefill and budget > 0:
                count = min(job.left_to_prefill, budget)
                chunks.append((job, count))
                budget -= count
        prefill = sum(count for _, count in chunks)
        seconds = (
            self.model.step_seconds
            + prefill / self.model.prefill_tokens_per_second
            + len(decoding) * self.model.decode_seconds
        )
        steps = 1
        if not chunks and decoding:
            steps = min(job.request.output_tokens - job.emitted for job in decoding)
        return seconds, chunks, decoding, max(1, steps)


class Policy(Protocol):
    """Picks replicas, and hears what becomes of what it placed."""

    def pick(
        self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float
    ) -> SimulatedReplica | None:
        """Say where a request goes; `None`: it waits. `now` in seconds of the simulation."""

    def released(self) -> Sequence[tuple[TraceRequest, SimulatedReplica]]:
        """Say which requests wait no longer, and where they went. Asked after each event."""

    def on_first_token(self, replica: SimulatedReplica, job: Job) -> None:
        """A prompt is computed."""

    def on_end(self, replica: SimulatedReplica, job: Job) -> None:
        """An answer is whole."""


class World:
    """Replays a trace through one policy, in virtual time and open loop."""

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        policy: Policy,
    ) -> None:
        self.replicas = replicas
        self._policy = policy
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.now = 0.0
        self.jobs: list[Job] = []
        self.imbalance: list[float] = []
        self._held: dict[int, Job] = {}

    def run(self, requests: Sequence[TraceRequest], *, speed: float) -> list[Job]:
        """Replay all; return the jobs as they went."""
        for request in requests:
            self._at(request.at_seconds / speed, lambda request=request: self._arrive(request))  # type: ignore[misc]  # bound early on purpose
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
            for request, replica in self._policy.released():
                self._start(self._held.pop(id(request)), replica)
        return self.jobs

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (seconds, self._number, act))

    def _arrive(self, request: TraceRequest) -> None:
        replica = self._policy.pick(request, self.replicas, self.now)
        job = Job(request, self.now)
        self.jobs.append(job)
        if replica is None:
            self._held[id(request)] = job
        else:
            self._start(job, replica)

    def _start(self, job: Job, replica: SimulatedReplica) -> None:
        replica.in_flight += 1
        replica.served += 1
        replica.waiting.append(job)
        loads = [r.in_flight for r in self.replicas]
        self.imbalance.append(max(loads) * len(loads) / sum(loads))
        if replica.busy_until is None:
            self._step(replica)

    def _step(self, replica: SimulatedReplica) -> None:
        replica.admit(self.now)
        if not replica.running:
            replica.busy_until = None
            return
        seconds, chunks, decoding, steps = replica.plan_step()
        if steps > 1 and self._events:
            # Equal steps are taken at once up to the next event, which may bring a prompt.
            steps = max(1, min(steps, int((self._events[0][0] - self.now) / seconds)))
        replica.busy_until = self.now + seconds * steps
        self._at(replica.busy_until, lambda: self._end_step(replica, chunks, decoding, steps))

    def _end_step(
        self, replica: SimulatedReplica, chunks: list[tuple[Job, int]], decoding: list[Job], steps: int
    ) -> None:
        for job, count in chunks:
            job.left_to_prefill -= count
            if not job.left_to_prefill:
                job.emitted = 1
                job.first_token_at = self.now
                self._policy.on_first_token(replica, job)
        for job in decoding:
            job.emitted += steps
        ended = [job for job in replica.running if job.emitted >= job.request.output_tokens > 0]
        for job in ended:
            job.ended_at = self.now
            replica.running.remove(job)
            replica.release(job)
            replica.in_flight -= 1
            self._policy.on_end(replica, job)
        self._step(replica)
