"""The port between the HTTP face and what generates text."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from workers.engines.openai_server.metrics import EngineLoad
from workers.engines.openai_server.stream import GenerationStream
from workers.kv.tiers.sessions import SessionRow
from workers.kv.transfer import Block

Status = Literal["loading", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the engine can answer. `progress` of loading is 0-1."""

    status: Status
    progress: float = 1.0


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation, its text parts joined."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """What to generate, checked and tokenised."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    session_id: str = ""
    """Names the conversation that the request is a turn of; empty: none."""


@runtime_checkable
class SessionKeeper(Protocol):
    """An engine that knows sessions, and can be told which one has its next turn soon. Only when ready."""

    def announce(self, *, session_id: str, tokens: Sequence[int]) -> Future[int]:
        """Bring back what lies in lower tiers: of a session's last turn, or of these tokens.

        The result is how many blocks are on their way.
        """
        ...

    def sessions(self) -> Future[list[SessionRow]]:
        """All sessions, the one seen last first."""
        ...


@dataclass(frozen=True, slots=True)
class HeldSession:
    """What a replica has of a session's last turn."""

    chain: tuple[bytes, ...]
    """Digests of its whole blocks; empty for a session that is not known here."""
    readable_blocks: int
    """Leading blocks that can be read out now."""
    open_requests: int


@runtime_checkable
class SessionMover(Protocol):
    """An engine whose sessions can move to another replica with their KV. Only when ready."""

    kv_shape: bytes
    """16 bytes that name weights, element type and block shape."""
    kv_block_bytes: int

    def held(self, session_id: str) -> Future[HeldSession]:
        """What there is of a session."""
        ...

    def read_blocks(self, digests: Sequence[bytes]) -> Future[list[bytes]]:
        """Copies of blocks, up to the first that is not in memory."""
        ...

    def known_blocks(self, chain: Sequence[bytes]) -> Future[int]:
        """How many leading blocks of a chain are here already."""
        ...

    def take_blocks(self, blocks: Sequence[Block]) -> Future[int]:
        """Cache blocks; the result is how many of them are here now, from the first on."""
        ...

    def adopt_session(self, session_id: str, chain: Sequence[bytes]) -> Future[int]:
        """Keep a session's blocks for its next turn; the result is the tokens that are here."""
        ...

    def let_session_go(self, session_id: str) -> Future[bool]:
        """Let a session's blocks go first; false if it is unknown, or a turn of it runs."""
        ...


class TextEngine(Protocol):
    """What generates text. Methods are called on the server's event loop and must not block."""

    owner: str
    """`owned_by` in the list of models; says so if the engine is simulated."""

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus completion. Known when ready."""
        ...

    def start(self) -> None:
        """Begin to load. Called once, when the port is open."""
        ...

    def stop(self) -> None:
        """End all work. Called once, after the last response."""
        ...

    def readiness(self) -> Readiness:
        """Whether requests can be answered."""
        ...

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Tokens of a conversation with the prompt for the next answer. Raises `ApiError`."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a plain prompt."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        ...

    def submit(self, task: GenerationTask, stream: GenerationStream) -> None:
        """Queue a task; its text arrives on the stream."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a task that nobody waits for and free what it holds. Unknown ids are ignored."""
        ...

    def load(self) -> EngineLoad:
        """Requests and blocks now."""
        ...
