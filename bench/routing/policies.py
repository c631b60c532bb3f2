"""The policies that are compared. Each sees of a replica only what a gateway would."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.routing.world import Job, SimulatedReplica
from bench.traces import TraceRequest
from exaserve_ops.gateway.router import Bounds
from exaserve_ops.routing.domain import hashing
from exaserve_ops.routing.domain.prefixes import Beginning, PrefixMemory, choose_by_prefix


@dataclass(slots=True)
class RoundRobin:
    """One after the other."""

    _turn: itertools.count[int] = field(default_factory=itertools.count)

    def pick(
        self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float
    ) -> SimulatedReplica:
        del request, now
        return replicas[next(self._turn) % len(replicas)]

    def released(self) -> Sequence[tuple[TraceRequest, SimulatedReplica]]:
        """Nobody waits."""
        return ()

    def on_first_token(self, replica: SimulatedReplica, job: Job) -> None:
        """Nothing is remembered."""

    def on_end(self, replica: SimulatedReplica, job: Job) -> None:
        """Nothing is remembered."""


@dataclass(slots=True)
class LeastLoaded(RoundRobin):
    """The one with the fewest open requests."""

    def pick(
        self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float
    ) -> SimulatedReplica:
        del request, now
        return min(replicas, key=lambda replica: (replica.in_flight, replica.name))


@dataclass(slots=True)
class HashOnly(RoundRobin):
    """By the hash of the prompt's first blocks, whatever the load."""

    blocks: int = 2

    def pick(
        self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float
    ) -> SimulatedReplica:
        del now
        seed = hashing.key_seed(repr(request.prefix_ids[: self.blocks]))
        return hashing.rank(seed, replicas, lambda replica: replica.name)[0]


_BOUNDS = Bounds()


class Ours:
    """What the gateway does: the cheapest of those that have the beginning, and of a few others.

    A long prompt goes only where no other one is being computed, or waits.
    """

    def __init__(self, bounds: Bounds = _BOUNDS, *, hears_of_evictions: bool = True) -> None:
        self._rng = random.Random(0)  # noqa: S311 - load balancing, no secret
        self._memory = PrefixMemory()
        self._sent: dict[int, float] = {}
        self._others = 2
        self._bounds = bounds
        self._hears_of_evictions = hears_of_evictions
        self._long_prompts: Counter[str] = Counter()
        self._waiting: list[TraceRequest] = []
        self._now = 0.0
        self._replicas: dict[str, SimulatedReplica] = {}

    def pick(
        self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float
    ) -> SimulatedReplica | None:
        self._now = now
        self._replicas = self._replicas or {replica.name: replica for replica in replicas}
        replica = self._place(request)
        if replica is None:
            self._waiting.append(request)
        return replica

    def released(self) -> Sequence[tuple[TraceRequest, SimulatedReplica]]:
        """First come, first served."""
        placed: list[tuple[TraceRequest, SimulatedReplica]] = []
        while self._waiting and (replica := self._place(self._waiting[0])):
            placed.append((self._waiting.pop(0), replica))
        return placed

    def on_first_token(self, replica: SimulatedReplica, job: Job) -> None:
        """The gateway sees the first byte: what was pending is computed."""
        uncached = self._sent.pop(id(job.request))
        replica.pending_tokens -= uncached
        self._long_prompts[replica.name] -= uncached >= self._bounds.long_prompt_tokens

    def on_end(self, replica: SimulatedReplica, job: Job) -> None:
        """What it had stays in its cache."""

    def _place(self, request: TraceRequest) -> SimulatedReplica | None:
        beginning = describe(request)
        are_taken = self._long_prompts.total() >= max(
            1.0, self._bounds.long_prompt_share * len(self._replicas)
        )

        def takes(name: str, cached_tokens: float) -> SimulatedReplica | None:
            is_long = beginning.total_tokens - cached_tokens >= self._bounds.long_prompt_tokens
            if is_long and (are_taken or self._long_prompts[name] >= self._bounds.long_prompts):
                return None
            return self._replicas[name]

        free = [name for name in self._replicas if takes(name, 0.0)]
        others = [self._replicas[name] for name in self._rng.sample(free, min(self._others, len(free)))]
        choice = choose_by_prefix(beginning, self._memory, takes, others, evicted_until=self._evicted_until)
        if choice is None:
            return None
        uncached = beginning.total_tokens - choice.cached_tokens
        choice.server.pending_tokens += uncached
        self._sent[id(request)] = uncached
        self._long_prompts[choice.server.name] += uncached >= self._bounds.long_prompt_tokens
        self._memory.note(beginning.digests, choice.server.name, self._now)
        return choice.server

    def _evicted_until(self, name: str) -> float:
        until = self._replicas[name].evicted_used_at
        return -math.inf if until is None or not self._hears_of_evictions else until


def describe(request: TraceRequest) -> Beginning:
    """Name the beginnings of a trace's prompt; its block ids stand for the text."""
    full = request.prefix_ids[: request.prompt_tokens // request.block_tokens]
    return Beginning(
        tuple(block.to_bytes(8, "little") for block in full),
        tuple(float((index + 1) * request.block_tokens) for index in range(len(full))),
        float(request.prompt_tokens),
    )


POLICIES: dict[str, Callable[[], RoundRobin | Ours]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "hash_only": HashOnly,
    "exaserve": Ours,
    "exaserve, told of no evictions": functools.partial(Ours, hears_of_evictions=False),
    "exaserve, no class of long prompts": functools.partial(Ours, Bounds(long_prompt_tokens=1_000_000_000)),
}
