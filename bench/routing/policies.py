"""The policies that are compared. Each sees of a replica only what a gateway would."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.routing.world import Job, SimulatedReplica
from bench.traces import TraceRequest
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


class Ours:
    """What the gateway does: the cheapest of those that have the beginning, and of a few others."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - load balancing, no secret
        self._memory = PrefixMemory()
        self._sent: dict[int, float] = {}
        self._others = 2

    def pick(
        self, request: TraceRequest, replicas: Sequence[SimulatedReplica], now: float
    ) -> SimulatedReplica:
        del now
        beginning = describe(request)
        known = {replica.name: replica for replica in replicas}
        others = self._rng.sample(list(replicas), min(self._others, len(replicas)))
        choice = choose_by_prefix(beginning, self._memory, known.get, others)
        if choice is None:
            raise ValueError("a fleet without replicas")
        uncached = beginning.total_tokens - choice.cached_tokens
        choice.server.pending_tokens += uncached
        self._sent[id(request)] = uncached
        self._memory.note(beginning, choice.server.name)
        return choice.server

    def on_first_token(self, replica: SimulatedReplica, job: Job) -> None:
        """The gateway sees the first byte: what was pending is computed."""
        replica.pending_tokens -= self._sent.pop(id(job.request))

    def on_end(self, replica: SimulatedReplica, job: Job) -> None:
        """What it had stays in its cache."""


def describe(request: TraceRequest) -> Beginning:
    """Name the beginnings of a trace's prompt; its block ids stand for the text."""
    full = request.prefix_ids[: request.prompt_tokens // request.block_tokens]
    return Beginning(
        tuple(block.to_bytes(16, "little") for block in full),
        tuple(float((index + 1) * request.block_tokens) for index in range(len(full))),
        float(request.prompt_tokens),
    )


POLICIES: dict[str, Callable[[], RoundRobin | Ours]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "hash_only": HashOnly,
    "exaserve": Ours,
}
