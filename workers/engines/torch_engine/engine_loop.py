"""The thread that computes: takes requests in, steps, hands text out."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from workers.engines.kv_blocks import BlockAllocator
from workers.engines.openai_server.metrics import EngineLoad, EngineMetrics
from workers.engines.openai_server.port import GenerationTask
from workers.engines.openai_server.stop_strings import TextEnd, text_end
from workers.engines.openai_server.stream import Delta, FinishReason, GenerationStream, push_deltas
from workers.engines.torch_engine.model import StepModel
from workers.engines.torch_engine.sampling import Choice, Sampler
from workers.engines.torch_engine.scheduler import Chunk, Scheduler, Sequence, StepPlan
from workers.engines.torch_engine.tokenizer import IncrementalDecoder, ModelTokenizer
from workers.kv.tiers.sessions import SessionRow, SessionTable, Turn
from workers.kv.tiers.store import TieredStore
from workers.protocol.digests import KV_BLOCK_TOKENS

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_ROOM_SECONDS = 0.002
_PACE_TOKENS = 2 * KV_BLOCK_TOKENS
"""A step of fewer tokens says little about what a prompt costs."""


@dataclass(frozen=True, slots=True)
class KvMemoryOfSessions:
    """What is known of sessions, and where their blocks are when they have to leave."""

    sessions: SessionTable
    store: TieredStore | None = None
    """`None`: there are no tiers."""


@dataclass(slots=True)
class _Request:
    """One open request, as the loop sees it."""

    task: GenerationTask
    stream: GenerationStream
    sequence: Sequence
    sampler: Sampler
    decoder: IncrementalDecoder
    stops: TextEnd

    @property
    def generated(self) -> int:
        return len(self.sequence.tokens) - len(self.task.prompt)


class EngineLoop:
    """Steps the model while there is work. `submit`, `cancel` and `load` may be called by any thread.

    A failure ends every open request with an error and the loop with it: what the device's memory
    holds after an exception cannot be trusted, so the process is to be replaced.
    """

    def __init__(
        self,
        model: StepModel,
        tokenizer: ModelTokenizer,
        allocator: BlockAllocator,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        *,
        eos_token_ids: frozenset[int],
        memory: KvMemoryOfSessions | None = None,
    ) -> None:
        """Bind the parts; `run` does the work."""
        self._sessions = memory.sessions if memory else None
        self._store = memory.store if memory else None
        self._model = model
        self._tokenizer = tokenizer
        self._allocator = allocator
        self._scheduler = scheduler
        self._metrics = metrics
        self._eos_token_ids = eos_token_ids
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._requests: dict[str, _Request] = {}
        self._load = EngineLoad(blocks=allocator.use())
        self._stopping = False
        self.failed = False
        """True once the loop has died."""

    def submit(self, task: GenerationTask, stream: GenerationStream) -> None:
        """Queue a request."""
        self._post(lambda: self._add(task, stream))

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its blocks before the next step."""
        self._post(lambda: self._drop(request_id))

    def announce(self, session_id: str, tokens: Sequences[int]) -> Future[int]:
        """Bring back what lies below of a session's last turn, or of tokens; the result is the blocks."""
        answer: Future[int] = Future()
        self._post(lambda: answer.set_result(self._prefetch(session_id, tokens)))
        return answer

    def sessions(self) -> Future[list[SessionRow]]:
        """All sessions, the one seen last first."""
        answer: Future[list[SessionRow]] = Future()
        self._post(lambda: answer.set_result(self._session_rows()))
        return answer

    def between_steps(self, action: Callable[[], _T]) -> Future[_T]:
        """Do something in the thread that computes, before its next step. Any thread may call this."""
        answer: Future[_T] = Future()

        def act() -> None:
            try:
                answer.set_result(action())
            except ValueError as error:
                answer.set_exception(error)

        self._post(act)
        return answer

    def nudge(self) -> None:
        """Plan a step soon: something came that one may wait for. Any thread may call this."""
        self._post(_nothing)

    def stop(self) -> None:
        """End the loop after the step in progress."""
        self._stopping = True
        self._post(_nothing)

    def abandon(self) -> None:
        """End every open request with an error, though a step may never end. Any thread may call this."""
        self.failed = self._stopping = True
        self._fail_all()

    def load(self) -> EngineLoad:
        """Load after the last step."""
        return self._load

    def run(self) -> None:
        """Work until stopped."""
        try:
            while not self._stopping:
                self._take_in()
                if not self._stopping:
                    self._step()
        except Exception:
            log.exception("the model loop died")
            self.failed = True
            self._fail_all()

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()
        if self.failed:
            self._fail_all()

    def _take_in(self) -> None:
        """Act on what came in; wait for something if there is nothing to compute."""
        with self._wake:
            while not self._inbox and not self._requests:
                if not self._wake.wait(self._scheduler.tend_seconds):
                    break  # an empty step, which gives other replicas of the node the room they need
            actions = list(self._inbox)
            self._inbox.clear()
        for action in actions:
            action()
        if actions:
            self._note_load()

    def _add(self, task: GenerationTask, stream: GenerationStream) -> None:
        sequence = Sequence(task.request_id, list(task.prompt))
        if self._sessions is not None and task.session_id:
            self._sessions.begin_turn(task.session_id, now=time.monotonic())
        self._requests[task.request_id] = _Request(
            task=task,
            stream=stream,
            sequence=sequence,
            sampler=Sampler.seeded(task.temperature, task.top_p, task.seed, drawn=task.continued_tokens),
            decoder=IncrementalDecoder(self._tokenizer, task.prompt),
            stops=self._text_end(task),
        )
        self._scheduler.add(sequence)

    def _text_end(self, task: GenerationTask) -> TextEnd:
        """What ends the text; of one that is continued, a stop string may have begun before."""
        end = text_end(task.stop, keeps_stop=task.keeps_stop)
        # A character has at most four tokens.
        recent = min(task.continued_tokens, 4 * max(map(len, task.stop), default=0))
        if recent:
            end.feed(self._tokenizer.decode_certain(task.prompt[-recent:]))
        return end

    def _drop(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.remove(request.sequence)
            self._end_turn(request)

    def _end_turn(self, request: _Request) -> None:
        """Account for a request, and keep hot what its session's next turn begins with."""
        sequence, session_id = request.sequence, request.task.session_id
        if self._sessions is None or not session_id:
            return
        # One that never began has left nothing: what the session had before stays hot.
        begun = sequence.admitted_before
        chain = tuple(sequence.chain) if begun else self._sessions.chain_of(session_id)
        prompt = request.stream.prompt
        turn = Turn(
            prompt_tokens=len(request.task.prompt) if begun else 0,
            generated_tokens=request.generated,
            cached_tokens={
                "accelerator": prompt.accelerator_tokens,
                "host": prompt.host_tokens,
                "disk": prompt.disk_tokens,
            },
            preemptions=sequence.preemptions,
            swaps=sequence.swaps,
        )
        self._sessions.end_turn(session_id, chain, turn, now=time.monotonic())

    def _prefetch(self, session_id: str, tokens: Sequences[int]) -> int:
        if tokens:
            return self._scheduler.prefetch(self._scheduler.chain_of(tokens))
        return self._scheduler.prefetch(self._sessions.chain_of(session_id) if self._sessions else ())

    def _session_rows(self) -> list[SessionRow]:
        return self._sessions.rows(now=time.monotonic()) if self._sessions else []

    def _step(self) -> None:
        if self._sessions is not None:
            self._sessions.forget_old(now=time.monotonic())
        plan = self._scheduler.plan_step()
        self._note_admissions(plan)
        if not plan.chunks:
            self._note_load()
            self._wait_for_room()
            return
        began = time.monotonic()
        sampled = self._model.compute(plan.chunks, self._next_choice)
        self._note_pace(plan, time.monotonic() - began)
        self._scheduler.complete(plan)
        deltas = []
        for chunk, token in sampled:
            request = self._requests[chunk.sequence.request_id]
            request.sequence.tokens.append(token)
            delta = self._read_token(request, token)
            if delta.finish is not None:
                self._drop(request.task.request_id)
                if self._store is not None:
                    request.stream.swaps = (request.sequence.preemptions, request.sequence.swaps)
            deltas.append((request.stream, delta))
        self._note_load()
        push_deltas(deltas)

    def _next_choice(self, chunk: Chunk) -> Choice:
        return self._requests[chunk.sequence.request_id].sampler.next_choice()

    def _wait_for_room(self) -> None:
        """Pause while requests wait for blocks that other replicas have yet to give back."""
        with self._wake:
            if self._requests and not self._inbox:
                self._wake.wait(_ROOM_SECONDS)

    def _note_admissions(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._requests[admission.sequence.request_id].stream.begin(admission.prompt)
        if plan.preempted:
            self._metrics.count_preemptions(
                recompute=len(plan.preempted) - plan.kept_below, swap=plan.kept_below
            )

    def _note_pace(self, plan: StepPlan, seconds: float) -> None:
        """Tell what it costs to compute a prompt's block, against which fetching one is weighed."""
        tokens = sum(chunk.count for chunk in plan.chunks)
        if self._store is not None and tokens >= _PACE_TOKENS and tokens > 2 * len(plan.chunks):
            self._store.note_computed(tokens / KV_BLOCK_TOKENS, seconds)

    def _read_token(self, request: _Request, token: int) -> Delta:
        """Turn a new token into text and decide whether the request ends with it."""
        if token in self._eos_token_ids and not request.task.ignore_eos:
            return Delta(request.stops.flush(), (token,), "stop")
        text, stopped = request.stops.feed(request.decoder.feed(token))
        finish: FinishReason | None = None
        if stopped:
            finish = "stop"
        elif request.generated >= request.task.max_tokens:
            finish = "length"
            text += request.stops.flush()
        return Delta(text, (token,), finish)

    def _note_load(self) -> None:
        self._load = EngineLoad(
            running=self._scheduler.running - self._scheduler.fetching,
            waiting=self._scheduler.waiting + self._scheduler.fetching,
            blocks=self._allocator.use(),
            evicted_blocks=self._allocator.evicted_blocks,
            # With tiers below, a block that leaves the accelerator is not lost.
            evicted_idle_since_seconds=None if self._store else self._allocator.evicted_idle_since_seconds,
            tiers=self._store.facts() if self._store is not None else None,
        )

    def _fail_all(self) -> None:
        with self._wake:
            actions = list(self._inbox)
            self._inbox.clear()
        for action in actions:
            action()
        streams = [request.stream for request in self._requests.values()]
        self._requests.clear()
        push_deltas([(stream, Delta("", finish="error")) for stream in streams])


def _nothing() -> None:
    """An action that only wakes the loop."""
