"""Sessions as one replica knows them: what their turns used, and what is kept hot for the next one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.kv.tiers.heat import Heat
from workers.kv.tiers.policy import TIERS, Tier

LIVE_SECONDS = 600.0
"""A session whose last turn is longer ago is not live any more."""
MOST_SESSIONS = 4096
_HOT_RATIO = 0.75
"""Part of the blocks that sessions may keep hot: a new one must be able to get hot, too."""


@dataclass(slots=True)
class SessionUse:
    """What a session's turns used since it was first seen."""

    requests: int = 0
    open_requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    """Prompt tokens that needed no computing, by where they were found."""
    preemptions: int = 0
    """How often a request of it was set back."""
    swaps: int = 0
    """How often its blocks were brought back from a lower tier."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request used."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: Mapping[Tier, int]
    preemptions: int
    swaps: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One session, for people."""

    session_id: str
    idle_seconds: float
    use: SessionUse
    kept_blocks: int
    """Whole blocks of its last turn, wherever they are now."""


@dataclass(slots=True)
class _Session:
    use: SessionUse = field(default_factory=SessionUse)
    chain: tuple[bytes, ...] = ()
    seen_at: float = 0.0


class SessionTable:
    """The latest sessions; what the last turns of live ones hold is hot. For one thread."""

    def __init__(
        self,
        heat: Heat,
        *,
        hot_blocks: int,
        live_seconds: float = LIVE_SECONDS,
        most: int = MOST_SESSIONS,
    ) -> None:
        """Keep up to `hot_blocks` times 3/4 blocks hot, of the sessions that had a turn last."""
        self._heat = heat
        self._most_hot = int(hot_blocks * _HOT_RATIO)
        self._live_seconds = live_seconds
        self._most = most
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        """The one seen longest ago first."""
        self._hot: OrderedDict[str, None] = OrderedDict()
        """Sessions whose last turn is hot, likewise."""
        self._hot_blocks = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def begin_turn(self, session_id: str, *, now: float) -> None:
        """A request of a session arrived."""
        session = self._see(session_id, now)
        session.use.requests += 1
        session.use.open_requests += 1

    def end_turn(self, session_id: str, chain: tuple[bytes, ...], turn: Turn, *, now: float) -> None:
        """A request ended; `chain` names its whole blocks, which the next turn is likely to begin with."""
        session = self._see(session_id, now)
        use = session.use
        use.open_requests = max(0, use.open_requests - 1)
        use.prompt_tokens += turn.prompt_tokens
        use.generated_tokens += turn.generated_tokens
        use.preemptions += turn.preemptions
        use.swaps += turn.swaps
        for tier, tokens in turn.cached_tokens.items():
            use.cached_tokens[tier] += tokens
        self._keep_hot(session_id, session, chain)

    def chain_of(self, session_id: str) -> tuple[bytes, ...]:
        """Digests of the whole blocks of a session's last turn; empty if it is not known."""
        session = self._sessions.get(session_id)
        return () if session is None else session.chain

    def open_requests(self, session_id: str) -> int:
        """Requests of a session that have not ended."""
        session = self._sessions.get(session_id)
        return 0 if session is None else session.use.open_requests

    def adopt(self, session_id: str, chain: tuple[bytes, ...], *, now: float) -> None:
        """A session came from another replica with what it holds: keep that hot for its next turn."""
        self._keep_hot(session_id, self._see(session_id, now), chain)

    def let_go(self, session_id: str) -> bool:
        """A session went to another replica: what it holds goes first. False if a turn of it runs here."""
        session = self._sessions.get(session_id)
        if session is None or session.use.open_requests:
            return False
        self._forget(session_id)
        return True

    def forget_old(self, *, now: float) -> None:
        """Let sessions go that are not live any more."""
        for session_id, session in list(self._sessions.items()):
            if now - session.seen_at <= self._live_seconds:
                return
            if not session.use.open_requests:
                self._forget(session_id)

    def rows(self, *, now: float) -> list[SessionRow]:
        """All sessions, the one seen last first."""
        return [
            SessionRow(session_id, now - session.seen_at, session.use, len(session.chain))
            for session_id, session in reversed(self._sessions.items())
        ]

    def _keep_hot(self, session_id: str, session: _Session, chain: tuple[bytes, ...]) -> None:
        self._heat.warm(chain)  # before the last turn's cool, so that what both have stays where it is
        self._cool(session_id)
        session.chain = chain
        self._hot[session_id] = None
        self._hot_blocks += len(chain)
        while self._hot_blocks > self._most_hot:
            self._cool(next(iter(self._hot)))

    def _see(self, session_id: str, now: float) -> _Session:
        session = self._sessions.setdefault(session_id, _Session())
        session.seen_at = now
        self._sessions.move_to_end(session_id)
        while len(self._sessions) > self._most:
            self._forget(next(iter(self._sessions)))
        return session

    def _forget(self, session_id: str) -> None:
        self._cool(session_id)
        del self._sessions[session_id]

    def _cool(self, session_id: str) -> None:
        if session_id in self._hot:
            del self._hot[session_id]
            chain = self._sessions[session_id].chain
            self._hot_blocks -= len(chain)
            self._heat.cool(chain, coldest=True)
