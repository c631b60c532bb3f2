"""The engine behind the HTTP face: loads in a thread, then runs the loop in it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from workers.engines.openai_server.metrics import EngineLoad, EngineMetrics
from workers.engines.openai_server.port import (
    Borrowed,
    ChatMessage,
    GenerationTask,
    HeldSession,
    Readiness,
)
from workers.engines.openai_server.stream import GenerationStream
from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.prepared import tokenizer_of
from workers.engines.torch_engine.settings import EngineSettings
from workers.engines.torch_engine.tokenizer import ModelTokenizer
from workers.kv.neighbour import LentBlock
from workers.kv.tiers.sessions import SessionRow
from workers.kv.transfer import Block, Ticket

if TYPE_CHECKING:
    from workers.engines.torch_engine.engine_loop import EngineLoop
    from workers.engines.torch_engine.loading import LoadedEngine
    from workers.engines.torch_engine.session_moves import SessionMoves

_T = TypeVar("_T")

log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0


class LoopEngine:
    """Implements `TextEngine` with torch. Nothing of torch is imported before `start`."""

    owner = "exaserve"

    def __init__(self, settings: EngineSettings, config: ModelConfig) -> None:
        """Remember what to load; `start` loads it."""
        self._settings = settings
        self._config = config
        self._progress = 0.0
        self._load_failed = False
        self._tokenizer: ModelTokenizer | None = None
        self._loop: EngineLoop | None = None
        self._close: Callable[[], None] = _nothing
        self._max_model_tokens = 0
        self._thread = threading.Thread(target=self._load_and_run, name="engine-loop", daemon=True)
        self.metrics = EngineMetrics(self.load)

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus completion; 0 until loaded."""
        return self._max_model_tokens

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return self._config.vocabulary_size

    def start(self) -> None:
        """Load and run in a thread, so that the port answers meanwhile."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop and wait for the step in progress; a load in progress is not waited for."""
        if self._loop is not None:
            self._loop.stop()
            # A loop that failed may be in a step that never ends.
            self._thread.join(0 if self._loop.failed else _STOP_SECONDS)
            self._close()

    def readiness(self) -> Readiness:
        """Loading, ready, or failed for good."""
        if self._load_failed or (self._loop is not None and self._loop.failed):
            return Readiness("failed")
        if self._loop is None:
            return Readiness("loading", self._progress)
        return Readiness("ready")

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Tokens of a conversation. Only called when ready."""
        return self._ready_tokenizer().encode_chat(messages)

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a plain prompt. Only called when ready."""
        return self._ready_tokenizer().encode_text(text)

    def submit(self, task: GenerationTask, stream: GenerationStream) -> None:
        """Queue a task. Only called when ready."""
        if self._loop is None:
            raise RuntimeError("submit before ready")
        self._loop.submit(task, stream)

    def cancel(self, request_id: str) -> None:
        """Drop a task."""
        if self._loop is not None:
            self._loop.cancel(request_id)

    def announce(self, *, session_id: str, tokens: Sequence[int]) -> Future[int]:
        """Bring back what lies in lower tiers of a session's last turn, or of these tokens."""
        if self._loop is None:
            raise RuntimeError("announce before ready")
        return self._loop.announce(session_id, tokens)

    def sessions(self) -> Future[list[SessionRow]]:
        """All sessions, the one seen last first."""
        if self._loop is None:
            raise RuntimeError("sessions before ready")
        return self._loop.sessions()

    def load(self) -> EngineLoad:
        """Requests and blocks after the last step."""
        return EngineLoad() if self._loop is None else self._loop.load()

    def _ready_tokenizer(self) -> ModelTokenizer:
        if self._tokenizer is None:
            raise RuntimeError("encode before ready")
        return self._tokenizer

    def _load_and_run(self) -> None:
        began = time.monotonic()
        try:
            loop = self._load_all()
        except Exception:
            log.exception("loading %s failed", self._settings.model_dir)
            self._load_failed = True
            return
        log.info("ready after %.2f s", time.monotonic() - began)
        self._loop = loop
        loop.run()

    def _load_all(self) -> EngineLoop:
        self._tokenizer = tokenizer_of(self._settings.model_dir, self._settings.model_digest)
        loaded = self._load(self._tokenizer)
        self._max_model_tokens = loaded.max_model_tokens
        self._close = loaded.close
        return loaded.loop

    def _load(self, tokenizer: ModelTokenizer) -> LoadedEngine:
        # Imported here: torch takes a second, and the port is to answer before that.
        from workers.engines.torch_engine import loading  # noqa: PLC0415

        return loading.load_engine(self._settings, self._config, tokenizer, self.metrics, self._note_progress)

    def _fail(self) -> None:
        """Take nothing more, and end what is open with an error: a step that goes on may never end."""
        self._load_failed = True
        if self._loop is not None:
            self._loop.abandon()

    def _note_progress(self, done_ratio: float) -> None:
        self._progress = done_ratio


class TorchEngine(LoopEngine):
    """The whole model in one process, so that sessions can move to and from it with their KV."""

    def __init__(self, settings: EngineSettings, config: ModelConfig) -> None:
        """Remember what to load; `start` loads it."""
        super().__init__(settings, config)
        self._moves: SessionMoves | None = None
        self.kv_shape = b""
        """16 bytes that name weights, element type and block shape; empty until loaded."""
        self.kv_block_bytes = 0
        self.kv_described = ""
        self.kv_arena = b""
        """16 bytes that name the memory that replicas of this node draw on; empty: it is this one's alone."""

    def held(self, session_id: str) -> Future[HeldSession]:
        """What there is of a session."""
        return self._move(lambda moves: moves.held(session_id))

    def read_blocks(self, digests: Sequence[bytes]) -> Future[list[bytes]]:
        """Copies of blocks, up to the first that is not in memory."""
        return self._move(lambda moves: moves.read(digests))

    def lend_blocks(self, ticket: Ticket, first: int, digests: Sequence[bytes]) -> Future[list[LentBlock]]:
        """Say where blocks lie in the node's memory, up to the first that is not there."""
        return self._move(lambda moves: moves.lend(ticket, first, digests))

    def borrow_blocks(
        self, ticket: Ticket, first: int, digests: Sequence[bytes], lent: Sequence[LentBlock]
    ) -> Future[Borrowed]:
        """Copy what a neighbour lends, up to the first block that is not as it was lent."""
        return self._move(lambda moves: moves.borrow(ticket, first, digests, lent))

    def known_blocks(self, chain: Sequence[bytes]) -> Future[int]:
        """How many leading blocks of a chain are here already."""
        return self._move(lambda moves: moves.known(chain))

    def take_blocks(self, blocks: Sequence[Block]) -> Future[int]:
        """Cache blocks; the result is how many of them are here now, from the first on."""
        return self._move(lambda moves: moves.take(blocks))

    def adopt_session(self, session_id: str, chain: Sequence[bytes]) -> Future[int]:
        """Keep a session's blocks for its next turn; the result is the tokens that are here."""
        return self._move(lambda moves: moves.adopt(session_id, chain))

    def let_session_go(self, session_id: str) -> Future[bool]:
        """Let a session's blocks go first; false if it is unknown, or a turn of it runs."""
        return self._move(lambda moves: moves.let_go(session_id))

    def _move(self, action: Callable[[SessionMoves], _T]) -> Future[_T]:
        loop, moves = self._loop, self._moves
        if loop is None or moves is None:
            raise RuntimeError("move before ready")
        return loop.between_steps(lambda: action(moves))

    def _load(self, tokenizer: ModelTokenizer) -> LoadedEngine:
        loaded = super()._load(tokenizer)
        self._moves = loaded.moves
        self.kv_shape, self.kv_block_bytes = loaded.kv_shape, loaded.kv_block_bytes
        self.kv_described, self.kv_arena = loaded.kv_described, loaded.kv_arena
        return loaded


def _nothing() -> None:
    """Close what was never opened."""
