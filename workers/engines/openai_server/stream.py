"""One request's text on its way from the engine to its client, with its timings."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from workers.engines.kv_blocks import PromptUse
from workers.engines.openai_server.metrics import EngineMetrics

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that became certain in one step. Empty while a character or stop string may be open."""

    text: str
    token_ids: tuple[int, ...] = ()
    """What was generated in it; the text may lag behind, or be that of earlier ones."""
    finish: FinishReason | None = None


class GenerationAbortedError(Exception):
    """The client has gone; nobody waits for the rest."""


class GenerationStream:
    """Carries deltas from the engine (any thread) to the response (event loop).

    The engine calls `begin` once, then `push_deltas`; the response awaits `next_delta`.
    """

    def __init__(
        self, *, loop: asyncio.AbstractEventLoop, metrics: EngineMetrics, prompt_tokens: int
    ) -> None:
        """Open a stream; the clock of its latencies starts now."""
        self.loop = loop
        self._metrics = metrics
        self._deltas: deque[Delta] = deque()
        self._changed = asyncio.Event()
        self._aborted = False
        self._arrived_at = time.monotonic()
        self._last_token_at: float | None = None
        self._outcome_counted = False
        self.prompt_tokens = prompt_tokens
        self.prompt = PromptUse(0)
        """What of the prompt was in cache, once the engine has taken it up."""
        self.completion_tokens = 0
        self.swaps: tuple[int, int] | None = None
        """How often the request was set back, and fetched from a lower tier; `None`: there are no tiers."""

    # ---- engine side -------------------------------------------------------------------------
    def begin(self, prompt: PromptUse) -> None:
        """Note that the engine took the request up, and what of its prompt was in cache."""
        self.prompt = prompt
        self._metrics.count_admission(
            queue_seconds=time.monotonic() - self._arrived_at,
            prompt_tokens=self.prompt_tokens,
            prompt=prompt,
        )

    def record(self, delta: Delta) -> None:
        """Count a delta at the moment it was made, so that a slow reader does not distort it."""
        now = time.monotonic()
        if delta.token_ids:
            if self._last_token_at is None:
                self._metrics.time_to_first_token.observe(now - self._arrived_at)
            else:
                self._metrics.inter_token_latency.observe(now - self._last_token_at)
            self._last_token_at = now
            self.completion_tokens += len(delta.token_ids)
            self._metrics.generation_tokens.inc(len(delta.token_ids))
        if delta.finish is not None:
            self.count_outcome(delta.finish)

    def count_outcome(self, outcome: str) -> None:
        """Count the end of the request, once."""
        if not self._outcome_counted:
            self._outcome_counted = True
            self._metrics.count_outcome(outcome, time.monotonic() - self._arrived_at)

    # ---- response side -----------------------------------------------------------------------
    async def next_delta(self) -> Delta:
        """Return the next delta. Raises `GenerationAbortedError` once `abort` was called."""
        while not self._deltas and not self._aborted:
            self._changed.clear()
            await self._changed.wait()
        if self._aborted:
            raise GenerationAbortedError
        return self._deltas.popleft()

    def abort(self) -> None:
        """End the wait for deltas: the client has gone."""
        self._aborted = True
        self._changed.set()

    def deliver(self, delta: Delta) -> None:
        """Take a delta in, on the event loop."""
        self._deltas.append(delta)
        self._changed.set()


def push_deltas(batch: Iterable[tuple[GenerationStream, Delta]]) -> None:
    """Hand one step's deltas over, waking each event loop once. Any thread may call this."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[GenerationStream, Delta]]] = {}
    for stream, delta in batch:
        stream.record(delta)
        by_loop.setdefault(stream.loop, []).append((stream, delta))
    for loop, pairs in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_deliver_all, pairs)


def _deliver_all(pairs: list[tuple[GenerationStream, Delta]]) -> None:
    for stream, delta in pairs:
        stream.deliver(delta)
