"""Text without a model: words by hash, at the pace that the settings say."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.engines.kv_blocks import BlockAllocator
from workers.engines.openai_server.errors import ApiError, bad_request
from workers.engines.openai_server.metrics import EngineLoad, EngineMetrics
from workers.engines.openai_server.port import ChatMessage, GenerationTask, Readiness
from workers.engines.openai_server.stop_strings import TextEnd, text_end
from workers.engines.openai_server.stream import Delta, FinishReason, GenerationStream, push_deltas
from workers.protocol.digests import KV_BLOCK_TOKENS, block_hash_chain

log = logging.getLogger(__name__)

VOCABULARY_SIZE = 1 << 16
_POLL_SECONDS = 0.05
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PIECE = re.compile(r"\s*\S{1,4}|\s+")
_TEXT = """
simulated text flows like water over stones and says nothing at all while the clock of the engine
keeps its steady pace for those who measure it — naïve as that may sound
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Pace, size and faults."""

    model_name: str
    ttft_seconds: float = 0.05
    itl_seconds: float = 0.01
    jitter_ratio: float = 0.0
    """Each wait is drawn evenly from (1 - jitter) to (1 + jitter) times its length."""
    kv_blocks: int = 2048
    max_model_len: int = 4096
    max_num_seqs: int = 64
    load_seconds: float = 0.0
    seed: int = 0
    fail_after: int | None = None
    """The model loop dies when it takes up the request after this many."""
    fail_loading: bool = False
    wake_seconds: float | None = None
    """How long it seems to wake; `None`: it cannot sleep."""
    fail_waking: bool = False


@dataclass(slots=True, eq=False)
class _Request:
    task: GenerationTask
    stream: GenerationStream
    blocks: list[int]
    chain: list[bytes]
    worker: asyncio.Task[None] | None = None


class SimulatedEngine:
    """Implements `TextEngine` on the server's event loop.

    Blocks for the whole request are taken at admission; who does not fit, waits in line. Prompts
    share blocks by prefix exactly as in the torch engine.
    """

    owner = "exaserve simulated"

    def __init__(
        self, settings: SimulationSettings, *, may_be_ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Make the engine; `start` begins its loading time, which lasts at least until it may be ready."""
        self._may_be_ready = may_be_ready
        self._settings = settings
        self._allocator = BlockAllocator(settings.kv_blocks)
        self._random = random.Random(settings.seed)  # noqa: S311 - jitter, no secret
        self._waiting: deque[_Request] = deque()
        self._running: dict[str, _Request] = {}
        self._taken_up = 0
        self._status = Readiness("loading", 0.0)
        self._loading: asyncio.Task[None] | None = None
        self.metrics = EngineMetrics(self.load)

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus completion."""
        return min(self._settings.max_model_len, self._settings.kv_blocks * KV_BLOCK_TOKENS)

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return VOCABULARY_SIZE

    def start(self) -> None:
        """Begin to load: wait, and say how far the wait is."""
        self._loading = asyncio.get_running_loop().create_task(self._load_slowly())

    def stop(self) -> None:
        """Nothing is left to end: all work was on the server's event loop."""

    def readiness(self) -> Readiness:
        """Loading, ready, or failed."""
        return self._status

    @property
    def can_sleep(self) -> bool:
        """Whether it was started for it."""
        return self._settings.wake_seconds is not None

    async def sleep(self) -> None:
        """Answer nothing any more. Asked again, nothing changes."""
        if self._status.status == "ready":
            self._status = Readiness("asleep")

    async def wake(self) -> None:
        """Answer again, after a while. Raises `ApiError` where the settings say that this fails."""
        if self._status.status != "asleep":
            return
        await asyncio.sleep(self._settings.wake_seconds or 0.0)
        if self._settings.fail_waking:
            raise ApiError(500, "It does not wake, as the settings asked for.", code="internal")
        self._status = Readiness("ready")

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Tokens of a conversation. Raises `ApiError` (400) for an unknown role."""
        for message in messages:
            if message.role not in _ROLES:
                raise bad_request(f"unknown role {message.role!r}", param="messages")
        text = "".join(f"\n{message.role}: {message.content}" for message in messages)
        return self.encode_text(text + "\nassistant:")

    def encode_text(self, text: str) -> list[int]:
        """One token for up to four letters, numbered by hash."""
        return [_token_of(piece) for piece in _PIECE.findall(text)]

    def submit(self, task: GenerationTask, stream: GenerationStream) -> None:
        """Queue a task."""
        chain = block_hash_chain(task.prompt, salt=self._settings.model_name.encode())
        self._waiting.append(_Request(task, stream, [], chain))
        self._admit()

    def cancel(self, request_id: str) -> None:
        """Drop a task, running or waiting."""
        request = self._running.get(request_id)
        if request is not None and request.worker is not None:
            request.worker.cancel()
            self._end(request)
            return
        kept = [other for other in self._waiting if other.task.request_id != request_id]
        self._waiting = deque(kept)

    def load(self) -> EngineLoad:
        """Requests and blocks now."""
        if self._status.status == "loading":
            return EngineLoad()
        return EngineLoad(
            len(self._running),
            len(self._waiting),
            self._allocator.use(),
            evicted_blocks=self._allocator.evicted_blocks,
        )

    async def _load_slowly(self) -> None:
        steps = 20
        for step in range(steps):
            self._status = Readiness("loading", step / steps)
            await asyncio.sleep(self._settings.load_seconds / steps)
        while not self._may_be_ready():  # noqa: ASYNC110 - a thread waits for the others, on no loop
            await asyncio.sleep(_POLL_SECONDS)
        if self._settings.fail_loading:
            log.error("loading failed, as the settings asked for")
            self._status = Readiness("failed")
        else:
            self._status = Readiness("ready")
            log.info("ready (simulated)")

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._settings.max_num_seqs:
            request = self._waiting[0]
            task = request.task
            total = -(-(len(task.prompt) + task.max_tokens) // KV_BLOCK_TOKENS)
            cached = self._allocator.match(request.chain[: (len(task.prompt) - 1) // KV_BLOCK_TOKENS])
            room = self._allocator.available - self._allocator.count_idle(cached)
            if room < total - len(cached):
                return
            self._waiting.popleft()
            self._allocator.acquire(cached)
            request.blocks = cached + (self._allocator.allocate(total - len(cached)) or [])
            self._running[task.request_id] = request
            request.stream.begin(
                self._allocator.prompt_use(
                    request.chain, prompt_tokens=len(task.prompt), cached_blocks=len(cached)
                )
            )
            request.worker = asyncio.get_running_loop().create_task(self._generate(request))
            self._taken_up += 1
            if self._settings.fail_after is not None and self._taken_up > self._settings.fail_after:
                self._die()
                return

    def _die(self) -> None:
        log.error("the model loop died, as the settings asked for")
        self._status = Readiness("failed")
        open_requests = [*self._running.values(), *self._waiting]
        self._waiting.clear()
        for request in open_requests:
            if request.worker is not None:
                request.worker.cancel()
            self._end(request)
        push_deltas([(request.stream, Delta("", finish="error")) for request in open_requests])

    async def _generate(self, request: _Request) -> None:
        task = request.task
        stops = text_end(task.stop, keeps_stop=task.keeps_stop)
        words = self._word_source(task)
        _pass_over(task, words, stops)
        await self._wait(self._settings.ttft_seconds)
        for count in range(1, task.max_tokens + 1):
            if count > 1:
                await self._wait(self._settings.itl_seconds)
            if count == 1:
                self._name_prompt_blocks(request)
            word = words.choice(_WORDS)
            text, stopped = stops.feed(" " + word)
            finish: FinishReason | None = None
            if stopped:
                finish = "stop"
            elif count == task.max_tokens:
                finish = "length"
                text += stops.flush()
            if finish is not None:
                self._end(request)
            push_deltas([(request.stream, Delta(text, (_token_of(word),), finish))])
            if finish is not None:
                return

    def _word_source(self, task: GenerationTask) -> random.Random:
        """Greedy and seeded requests repeat themselves; others differ from one to the next."""
        seed: object = task.seed
        if task.temperature == 0:
            seed = f"greedy {task.prompt[: len(task.prompt) - task.continued_tokens]}"
        elif seed is None:
            seed = self._random.random()
        return random.Random(str(seed))  # noqa: S311 - words, no secret

    def _name_prompt_blocks(self, request: _Request) -> None:
        for block, digest in zip(request.blocks, request.chain, strict=False):
            self._allocator.register(block, digest)

    def _end(self, request: _Request) -> None:
        if self._running.pop(request.task.request_id, None) is not None:
            self._allocator.release(request.blocks)
            request.blocks = []
            if self._status.status == "ready":
                self._admit()

    async def _wait(self, seconds: float) -> None:
        jitter = self._settings.jitter_ratio
        await asyncio.sleep(seconds * self._random.uniform(1 - jitter, 1 + jitter))


def _pass_over(task: GenerationTask, words: random.Random, stops: TextEnd) -> None:
    """Draw what another engine has drawn before its place was taken."""
    if task.temperature == 0 or task.seed is not None:
        for _ in range(task.continued_tokens):
            stops.feed(" " + words.choice(_WORDS))


def _token_of(piece: str) -> int:
    return zlib.crc32(piece.encode()) % VOCABULARY_SIZE
