"""What one inference engine would do, computed: queue, batch, KV pool, prefill and decode.

A request is decided once, when it enters the batch: its prefill waits for the prefills before it,
its decode speed follows the batch's size, and its end follows from both. So the cost is per request
and not per second, and thousands of seconds pass in milliseconds. Times are seconds of any clock
that the caller keeps; equal seeds and equal calls give equal figures.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from workers.protocol.digests import KV_BLOCK_TOKENS
from workers.protocol.kv_pools import AGE_STEPS, age_step
from workers.protocol.observed import ReplicaTelemetry

WINDOW_SECONDS = 10.0
KV_EXTENT_BLOCKS = 16
"""Blocks that are lent together: as few as a real pool lends."""
_LONGEST_QUEUE = 1024


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How fast and how large an engine is."""

    prefill_tokens_per_second: float = 12_000.0
    decode_seconds: float = 0.011
    """Between two tokens of a request that is alone in the batch."""
    decode_seconds_per_request: float = 0.0012
    """More for each other request in the batch."""
    batch_requests: int = 16
    kv_blocks: int = 1_024
    context_tokens: int = 4_096


@dataclass(frozen=True, slots=True)
class Traffic:
    """What clients ask of one replica. Sessions stay with it, so few of them make up most of it."""

    requests_per_second: float = 0.4
    sessions: int = 12
    question_tokens: float = 160.0
    answer_tokens: float = 140.0


@dataclass(slots=True)
class Request:
    """One request on its way. Zero for what has not been decided yet."""

    arrived_at: float
    prompt_tokens: int
    answer_tokens: int
    session: str
    cached_tokens: int = 0
    first_token_at: float = 0.0
    token_seconds: float = 0.0
    ends_at: float = math.inf

    @property
    def blocks(self) -> int:
        """KV blocks that it needs in the end."""
        return -(-(self.prompt_tokens + self.answer_tokens) // KV_BLOCK_TOKENS)

    def answered_tokens(self, now: float) -> int:
        """Tokens of the answer that exist by now."""
        if now < self.first_token_at or not self.first_token_at:
            return 0
        return min(self.answer_tokens, 1 + int((now - self.first_token_at) / self.token_seconds))


class KvUse(NamedTuple):
    """KV blocks of one engine, as a pool would see them."""

    live_blocks: int
    cached_by_age_blocks: tuple[int, ...]
    """Of conversations that are not being answered, in steps of `AGE_BOUNDS_SECONDS`."""
    waiting_requests: int
    short_blocks: int
    """What the request that waits longest lacks; 0 where it waits for its turn in the batch."""


class _Context(NamedTuple):
    tokens: int
    kept_at: float


@dataclass(slots=True)
class _Totals:
    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    """Of requests that are over."""
    query_tokens: int = 0
    hit_tokens: int = 0
    evicted_tokens: int = 0
    """Prompt tokens that were in cache once; those below never were."""
    unshared_tokens: int = 0
    partial_tokens: int = 0


@dataclass(slots=True)
class _Sample:
    at: float
    requests: int
    prompt_tokens: int
    answer_tokens: int
    query_tokens: int
    hit_tokens: int


class EngineModel:
    """One engine from its start to its end."""

    def __init__(self, shape: EngineShape, traffic: Traffic, rng: random.Random, now: float) -> None:
        self.shape = shape
        self.latency_factor = 1.0
        """Everything takes so many times as long as it should."""
        self.kv_blocks = shape.kv_blocks
        """What it may use at most. Less than before is reached as requests end; none is set back."""
        self._traffic = traffic
        self._rng = rng
        # Some replicas hold busier conversations than others, and stay so.
        self._rate = traffic.requests_per_second * rng.lognormvariate(-0.125, 0.5)
        self._next_arrival = now + self._pause()
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[float, int, Request]] = []
        self._order = 0
        self._blocks = 0
        self._prefill_free_at = now
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._context_tokens = 0
        self._evicted: dict[str, int] = {}
        """Tokens of conversations that had to leave the cache and have not come back."""
        self._totals = _Totals()
        self._first_tokens: deque[tuple[float, float, float]] = deque()
        self._samples: deque[_Sample] = deque()

    @property
    def active_requests(self) -> int:
        """Running and waiting."""
        return len(self._running) + len(self._waiting)

    def drain(self) -> None:
        """Take nothing new from the modelled clients."""
        self._next_arrival = math.inf

    def advance(self, now: float) -> None:
        """Let everything happen that is due by now, in the order of its time."""
        while True:
            end = self._running[0][0] if self._running else math.inf
            at = min(end, self._next_arrival)
            if at > now:
                return
            if end <= self._next_arrival:
                self._end_first()
            else:
                self._arrive(self._ask(at))
                self._next_arrival = at + self._pause()
            self._admit(at)

    def submit(self, request: Request) -> None:
        """Take a real request in, which must not lie before the last `advance`."""
        self.advance(request.arrived_at)
        self._arrive(request)
        self._admit(request.arrived_at)

    def next_event_seconds(self) -> float:
        """When the next request ends or arrives."""
        end = self._running[0][0] if self._running else math.inf
        return min(end, self._next_arrival)

    def telemetry(self, now: float) -> ReplicaTelemetry:
        """Load over the last ten seconds, as an agent's scraper would have measured it."""
        self.advance(now)
        used_blocks, answered = self._in_use(now)
        totals = self._totals
        new = _Sample(
            now,
            totals.requests,
            totals.prompt_tokens,
            totals.answer_tokens + answered,
            totals.query_tokens,
            totals.hit_tokens,
        )
        old = self._oldest_sample(new)
        span = now - old.at
        ttft, itl = self._latencies(now)
        queried = new.query_tokens - old.query_tokens
        return ReplicaTelemetry(
            window_seconds=span,
            requests_running=len(self._running),
            requests_waiting=len(self._waiting),
            kv_used_ratio=min(1.0, used_blocks / self.kv_blocks),
            kv_total_blocks=self.kv_blocks,
            kv_block_tokens=KV_BLOCK_TOKENS,
            requests_per_second=(new.requests - old.requests) / span if span else None,
            prompt_tokens_per_second=(new.prompt_tokens - old.prompt_tokens) / span if span else None,
            generation_tokens_per_second=(new.answer_tokens - old.answer_tokens) / span if span else None,
            prefix_hit_ratio=(new.hit_tokens - old.hit_tokens) / queried if queried else None,
            ttft_p50_seconds=_rank(ttft, 0.50),
            ttft_p95_seconds=_rank(ttft, 0.95),
            ttft_p99_seconds=_rank(ttft, 0.99),
            itl_p50_seconds=_rank(itl, 0.50),
            itl_p95_seconds=_rank(itl, 0.95),
            generation_tokens_total=float(new.answer_tokens),
            requests_total=float(new.requests),
            prefix_query_tokens_total=float(new.query_tokens),
            prefix_hit_tokens_total=float(new.hit_tokens),
            prefix_miss_tokens_total={
                "no_shared_prefix": float(totals.unshared_tokens),
                "shorter_than_a_block": float(totals.partial_tokens),
                "evicted": float(totals.evicted_tokens),
            },
        )

    def kv_use(self, now: float) -> KvUse:
        """KV blocks by what lies in them. Live ones and cached ones never add up to more than there are."""
        self.advance(now)
        live, _ = self._in_use(now)
        answered = {request.session for _, _, request in self._running}
        room = max(0, self.kv_blocks - live)
        ages = [0] * AGE_STEPS
        for session, (tokens, kept_at) in reversed(self._contexts.items()):  # the oldest are the first to go
            if session not in answered:
                blocks = min(room, tokens // KV_BLOCK_TOKENS)
                ages[age_step(now - kept_at) - 1] += blocks
                room -= blocks
        first = self._waiting[0] if self._waiting else None
        lacks = first is not None and len(self._running) < self.shape.batch_requests
        short = self._blocks + first.blocks - self.kv_blocks if first is not None and lacks else 0
        return KvUse(live, tuple(ages), len(self._waiting), max(0, short))

    def _in_use(self, now: float) -> tuple[int, int]:
        """Blocks of running requests, and tokens of their answers so far."""
        blocks = answered = 0
        for _, _, request in self._running:
            tokens = request.answered_tokens(now)
            answered += tokens
            blocks += -(-(request.prompt_tokens + tokens) // KV_BLOCK_TOKENS)
        return blocks, answered

    # ------------------------------------------------------------------ what happens
    def _pause(self) -> float:
        return self._rng.expovariate(self._rate) if self._rate > 0 else math.inf

    def _ask(self, at: float) -> Request:
        """The next question of one of the conversations; the busiest asks most."""
        index = min(self._traffic.sessions - 1, int(self._rng.expovariate(3.0 / self._traffic.sessions)))
        session = f"s{index}"
        question = 8 + int(self._rng.expovariate(1.0 / self._traffic.question_tokens))
        answer = 4 + int(self._rng.expovariate(1.0 / self._traffic.answer_tokens))
        before = self._known(session)
        if before + question + answer > self.shape.context_tokens:
            self._drop_context(session)  # a new conversation begins
            before = 0
        room = self.shape.context_tokens
        question = min(question, room - 4)
        return Request(at, before + question, min(answer, room - before - question), session)

    def _arrive(self, request: Request) -> None:
        if len(self._waiting) < _LONGEST_QUEUE:
            self._waiting.append(request)

    def _admit(self, now: float) -> None:
        shape = self.shape
        while self._waiting and len(self._running) < shape.batch_requests:
            request = self._waiting[0]
            if self._running and self._blocks + request.blocks > self.kv_blocks:
                return
            self._waiting.popleft()
            self._start(request, now)

    def _start(self, request: Request, now: float) -> None:
        shape, totals = self.shape, self._totals
        known = min(self._known(request.session), request.prompt_tokens - 1)
        request.cached_tokens = known // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        self._count_misses(request)
        fresh = request.prompt_tokens - request.cached_tokens
        prefill = fresh / shape.prefill_tokens_per_second * self.latency_factor
        self._prefill_free_at = max(now, self._prefill_free_at) + prefill
        batch = len(self._running)
        request.token_seconds = self.latency_factor * (
            shape.decode_seconds + shape.decode_seconds_per_request * batch
        )
        request.first_token_at = self._prefill_free_at + request.token_seconds
        request.ends_at = request.first_token_at + (request.answer_tokens - 1) * request.token_seconds
        self._order += 1
        heapq.heappush(self._running, (request.ends_at, self._order, request))
        self._blocks += request.blocks
        totals.prompt_tokens += request.prompt_tokens
        totals.query_tokens += request.prompt_tokens
        totals.hit_tokens += request.cached_tokens
        ttft = request.first_token_at - request.arrived_at
        self._first_tokens.append((request.first_token_at, ttft, request.token_seconds))

    def _end_first(self) -> None:
        _, _, request = heapq.heappop(self._running)
        self._blocks -= request.blocks
        self._totals.requests += 1
        self._totals.answer_tokens += request.answer_tokens
        context = _Context(request.prompt_tokens + request.answer_tokens, request.ends_at)
        self._keep_context(request.session, context)

    def _known(self, session: str) -> int:
        context = self._contexts.get(session)
        return context.tokens if context is not None else 0

    def _count_misses(self, request: Request) -> None:
        """Why what is computed was not in cache: at least a prompt's last token never is."""
        whole = (request.prompt_tokens - 1) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        missed = whole - request.cached_tokens
        evicted = min(missed, self._evicted.pop(request.session, 0) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS)
        self._totals.partial_tokens += request.prompt_tokens - whole
        self._totals.evicted_tokens += evicted
        self._totals.unshared_tokens += missed - evicted

    def _keep_context(self, session: str, context: _Context) -> None:
        self._drop_context(session)
        self._contexts[session] = context
        self._context_tokens += context.tokens
        while self._context_tokens > self.kv_blocks * KV_BLOCK_TOKENS:
            name, dropped = self._contexts.popitem(last=False)
            self._context_tokens -= dropped.tokens
            self._evicted[name] = dropped.tokens

    def _drop_context(self, session: str) -> None:
        self._context_tokens -= self._known(session)
        self._contexts.pop(session, None)

    # ------------------------------------------------------------------ what is measured
    def _oldest_sample(self, new: _Sample) -> _Sample:
        samples = self._samples
        samples.append(new)
        while samples[0].at < new.at - WINDOW_SECONDS:
            samples.popleft()
        return samples[0]

    def _latencies(self, now: float) -> tuple[list[float], list[float]]:
        """TTFT and ITL of the answers that began in the window, ascending."""
        seen = self._first_tokens
        while seen and seen[0][0] < now - WINDOW_SECONDS:
            seen.popleft()
        begun = [entry for entry in seen if entry[0] <= now]
        return sorted([ttft for _, ttft, _ in begun]), sorted([itl for _, _, itl in begun])


def _rank(ordered: list[float], share: float) -> float | None:
    """Nearest-rank quantile; `None` of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
