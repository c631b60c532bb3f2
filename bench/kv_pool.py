"""`python -m bench.kv_pool --json`: what a node's KV memory carries, reserved, paged and pooled.

One seeded mix of many-turn sessions, spread unevenly over the replicas of a node, is replayed three
ways in one run: every request reserves the longest length; each replica pages in memory of its own;
all replicas lease from the node's pool. Scheduling, allocation, prefix caching, leases and recalls are
the product's own code on real shared memory. Only the model is not computed: how long a step would
take comes from a stated formula, and figures in seconds are called modelled.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine import scheduler as scheduling
from workers.engines.torch_engine.kv_room import KvRoom, PooledRoom, PrivateRoom
from workers.engines.torch_engine.scheduler import Scheduler, SchedulerLimits
from workers.kv.layout import KvLayout
from workers.kv.lease import Terms, join
from workers.kv.pool import NodePools, pools_folder
from workers.protocol.digests import KV_BLOCK_TOKENS

WAYS = ("static", "paged", "pooled")
LIMIT_TOKENS = 4096
MEAN_TOKENS = 512
_LAYOUT = KvLayout(layers=1, kv_heads=1, head_size=16, dtype="float16")
"""Small blocks: what is measured is who may use how many, not what is in them."""
_SETTLE_ROUNDS = 4
_LONGEST_FILL_STEPS = 64


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a step of a replica would take. An assumption, the same for all three ways."""

    step_seconds: float = 0.015
    """Reading the weights once, whatever the batch."""
    decoded_token_seconds: float = 0.00006
    prefilled_token_seconds: float = 0.00012

    def seconds(self, plan: scheduling.StepPlan) -> float:
        """Time of one step."""
        decoded = sum(1 for chunk in plan.chunks if chunk.count == 1)
        prefilled = sum(chunk.count for chunk in plan.chunks) - decoded
        return (
            self.step_seconds
            + decoded * self.decoded_token_seconds
            + prefilled * self.prefilled_token_seconds
        )


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation: where it goes, and how long each of its requests gets."""

    number: int
    replica: int
    starts_at: float
    turns: tuple[tuple[int, int], ...]
    """(prompt tokens, tokens at the end) of each turn; a prompt holds all turns before it."""
    thinks_seconds: tuple[float, ...]
    seen_at_turn: int
    """The turn it is in at a moment taken at random."""

    def tokens(self, count: int) -> list[int]:
        """The first tokens of the conversation, unlike those of any other."""
        return [(self.number * 8191 + at * 31) & 0xFFFFFFFF for at in range(count)]


def make_sessions(count: int, replicas: int, seed: int) -> tuple[Session, ...]:
    """Make the mix: lengths of a long tail up to the limit, and replicas by a skewed popularity."""
    numbers = random.Random(seed)  # noqa: S311 - a reproducible load
    weights = [1 / (rank + 1) for rank in range(replicas)]
    numbers.shuffle(weights)
    sessions = []
    for number in range(count):
        turns = numbers.choices(range(1, 9), weights=[8, 7, 6, 5, 4, 3, 2, 1])[0]
        whole = min(LIMIT_TOKENS, max(48, numbers.lognormvariate(6.26, 0.85)))
        ends = [max(24 * (turn + 1), int(whole * (turn + 1) / turns)) for turn in range(turns)]
        starts = [0, *ends[:-1]]
        sessions.append(
            Session(
                number=number,
                replica=numbers.choices(range(replicas), weights=weights)[0],
                starts_at=numbers.uniform(0, 4),
                turns=tuple((end - (end - start) // 3, end) for start, end in zip(starts, ends, strict=True)),
                thinks_seconds=tuple(numbers.expovariate(1 / 2) for _ in range(turns)),
                seen_at_turn=numbers.randrange(turns),
            )
        )
    return tuple(sessions)


@dataclass
class Replica:
    """One replica's scheduler and blocks."""

    scheduler: Scheduler
    allocator: BlockAllocator
    running: dict[str, tuple[scheduling.Sequence, int]] = field(default_factory=dict)
    """Requests that are open, and the length at which each ends."""
    preempted: int = 0

    def add(self, request_id: str, tokens: list[int], goal: int) -> scheduling.Sequence:
        """Queue a request."""
        sequence = scheduling.Sequence(request_id, tokens)
        self.running[request_id] = (sequence, goal)
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> scheduling.StepPlan:
        """Plan a step and note what it sets back."""
        plan = self.scheduler.plan_step()
        self.preempted += len(plan.preempted)
        return plan


@dataclass
class Node:
    """All replicas of a node, with one clock."""

    replicas: list[Replica] = field(default_factory=list)
    capacity_tokens: int = 0
    now: float = 1000.0

    def live_tokens(self) -> int:
        """Tokens whose keys and values are held for open requests."""
        return sum(sequence.computed for r in self.replicas for sequence, _ in r.running.values())

    def held(self) -> int:
        """Requests that are being served: admitted, not queued."""
        return sum(r.scheduler.running for r in self.replicas)


@contextmanager
def node_of(way: str, replicas: int, blocks: int) -> Iterator[Node]:
    """Build a node whose replicas have `blocks` each, or bring so many to its pool."""
    node = Node(capacity_tokens=replicas * blocks * KV_BLOCK_TOKENS)
    most = blocks // (LIMIT_TOKENS // KV_BLOCK_TOKENS) if way == "static" else 4096
    limits = SchedulerLimits(most, max(512, most))
    with tempfile.TemporaryDirectory() as fallback, ExitStack() as stack:
        folder = pools_folder(f"bench-{random.SystemRandom().getrandbits(48):x}", Path(fallback))
        stack.callback(NodePools(folder).remove_all)
        for number in range(replicas):
            room: KvRoom = PrivateRoom()
            allocator = BlockAllocator(blocks) if way != "pooled" else None
            if allocator is None:
                longest = LIMIT_TOKENS // KV_BLOCK_TOKENS
                terms = Terms(blocks, minimum_blocks=longest, longest_blocks=longest)
                member = join(folder, _LAYOUT, f"replica-{number}", 1, terms)
                stack.callback(member.close)
                allocator = BlockAllocator(extent_blocks=member.extent_blocks)
                room = PooledRoom(member, allocator, lambda _source, _target: None, clock=lambda: node.now)
            scheduler = Scheduler(allocator, limits, salt=b"%d" % number, room=room)
            node.replicas.append(Replica(scheduler, allocator))
        yield node


def fill(node: Node, sessions: Sequence[Session]) -> dict[str, float]:
    """Let sessions arrive one by one, none ending, each with the whole of the turn that it is in.

    Returns the part of the capacity that is live when the first request must wait (or another one is
    set back for it), and how many sessions are held once all have come.
    """
    first_wait: float | None = None
    for session in sessions:
        replica = node.replicas[session.replica]
        length = session.turns[session.seen_at_turn][1]
        before = node.live_tokens() if first_wait is None else 0
        sequence = replica.add(str(session.number), session.tokens(length), length + 1)
        _settle(node, replica, sequence)
        waits = any(r.scheduler.waiting or r.preempted for r in node.replicas)
        if first_wait is None and waits:
            first_wait = before / node.capacity_tokens
    ratio = node.live_tokens() / node.capacity_tokens
    return {
        "used_ratio": ratio if first_wait is None else first_wait,
        "saturated_used_ratio": ratio,
        "sessions_held": node.held(),
        "preempted": sum(r.preempted for r in node.replicas),
    }


def _settle(node: Node, replica: Replica, sequence: scheduling.Sequence) -> None:
    """Step until a new request is computed, or the node has had its rounds to make room for it."""
    idle = 0
    for _ in range(_LONGEST_FILL_STEPS):
        plan = replica.plan()
        replica.scheduler.complete(plan)
        node.now += 0.05
        if sequence.computed == len(sequence.tokens):
            return
        if plan.chunks:
            continue
        idle += 1
        if idle > _SETTLE_ROUNDS or replica.scheduler.tend_seconds is None:
            return
        for other in node.replicas:
            if other is not replica:
                other.scheduler.complete(other.plan())


def replay(node: Node, sessions: Sequence[Session], cost: CostModel) -> dict[str, float]:
    """Play all sessions to their end, each replica stepping at its own pace in modelled time."""
    order = itertools.count()
    events: list[tuple[float, int, str, Any]] = []
    for session in sessions:
        heapq.heappush(events, (session.starts_at, next(order), "turn", (session, 0)))
    for index in range(len(node.replicas)):
        heapq.heappush(events, (0.0, next(order), "step", index))
    by_number = {str(session.number): session for session in sessions}
    turns = dict.fromkeys(by_number, 0)
    left, generated, cached, prompted, most_held, ended_at = len(sessions), 0, 0, 0, 0, 0.0
    while left:
        at, _, kind, what = heapq.heappop(events)
        node.now = 1000.0 + at
        if kind == "turn":
            session, turn = what
            prompt, end = session.turns[turn]
            node.replicas[session.replica].add(str(session.number), session.tokens(prompt), end)
            prompted += prompt
            continue
        replica = node.replicas[what]
        plan = replica.plan()
        cached += sum(admission.cached_tokens for admission in plan.admissions)
        most_held = max(most_held, node.held())
        took = cost.seconds(plan) if plan.chunks else 0.01
        heapq.heappush(events, (at + took, next(order), "step", what))
        replica.scheduler.complete(plan)
        for request_id in _sample(replica, plan):
            generated += by_number[request_id].turns[turns[request_id]][1]
            generated -= by_number[request_id].turns[turns[request_id]][0]
            turns[request_id] += 1
            session = by_number[request_id]
            if turns[request_id] < len(session.turns):
                back = at + took + session.thinks_seconds[turns[request_id]]
                heapq.heappush(events, (back, next(order), "turn", (session, turns[request_id])))
            else:
                left, ended_at = left - 1, at + took
    return {
        "tokens_per_second": generated / ended_at,
        "modelled_seconds": ended_at,
        "generated_tokens": generated,
        "prefix_hit_ratio": cached / prompted,
        "most_sessions_at_once": most_held,
        "preempted": sum(r.preempted for r in node.replicas),
    }


def _sample(replica: Replica, plan: scheduling.StepPlan) -> list[str]:
    """Append the next token of each sequence that has one; returns the requests that ended."""
    ended = []
    for chunk in plan.chunks:
        if chunk.samples:
            sequence, goal = replica.running[chunk.sequence.request_id]
            number, at = int(sequence.request_id), len(sequence.tokens)
            sequence.tokens.append((number * 8191 + at * 31) & 0xFFFFFFFF)
            if len(sequence.tokens) >= goal:
                replica.scheduler.remove(sequence)
                del replica.running[sequence.request_id]
                ended.append(sequence.request_id)
    return ended


def run(replicas: int, blocks: int, seed: int, replayed_sessions: int) -> dict[str, Any]:
    """Run all three ways and put their figures side by side."""
    cost = CostModel()
    offered = replicas * blocks * KV_BLOCK_TOKENS * 5 // 4 // MEAN_TOKENS
    sessions = make_sessions(max(offered, replayed_sessions), replicas, seed)
    lengths = [end for session in sessions for _, end in session.turns]
    seen = [session.turns[session.seen_at_turn][1] for session in sessions]
    loads = [sum(1 for session in sessions if session.replica == n) for n in range(replicas)]
    result: dict[str, Any] = {
        "replicas": replicas,
        "blocks_per_replica": blocks,
        "block_tokens": KV_BLOCK_TOKENS,
        "limit_tokens": LIMIT_TOKENS,
        "mean_request_tokens": round(sum(lengths) / len(lengths), 1),
        "mean_tokens_of_a_session_seen": round(sum(seen) / len(seen), 1),
        "offered_sessions": offered,
        "busiest_replica_load_ratio": round(max(loads) / len(sessions), 3),
        "seed": seed,
        "modelled": "step times, and with them tokens_per_second; blocks, leases and schedules are real",
        "cost_model": asdict(cost),
    }
    for way in WAYS:
        with node_of(way, replicas, blocks) as node:
            filled = fill(node, sessions[:offered])
        with node_of(way, replicas, blocks) as node:
            played = replay(node, sessions[:replayed_sessions], cost)
        result[f"{way}_used_ratio"] = round(filled["used_ratio"], 4)
        result[way] = {
            "sessions_held": int(filled["sessions_held"]),
            "saturated_used_ratio": round(filled["saturated_used_ratio"], 4),
            "tokens_per_second": round(played["tokens_per_second"], 1),
            "prefix_hit_ratio": round(played["prefix_hit_ratio"], 4),
            "most_sessions_at_once": int(played["most_sessions_at_once"]),
            "preempted_in_replay": int(played["preempted"]),
            "modelled_seconds": round(played["modelled_seconds"], 2),
        }
    for name in ("sessions_held", "tokens_per_second"):
        result[name] = {way: result[way][name] for way in WAYS}
    held, rates = result["sessions_held"], result["tokens_per_second"]
    result["sessions_over_static"] = round(held["pooled"] / held["static"], 2)
    result["tokens_per_second_over_paged"] = round(rates["pooled"] / rates["paged"], 2)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(prog="bench.kv_pool", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--replicas", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=2048, help="KV blocks that each replica has or brings")
    parser.add_argument("--sessions", type=int, default=960, help="sessions replayed for tokens a second")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(arguments)
    result = run(options.replicas, options.blocks, options.seed, options.sessions)
    if options.json:
        print(json.dumps(result))
        return 0
    for name, value in result.items():
        print(f"{name:32} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
