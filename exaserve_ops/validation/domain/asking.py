"""What a check asks of an engine, and what it gets: no check does any I/O itself.

A check is a generator. It yields what it needs and is sent the answer; it returns a `Finding`. So the same
code runs against an engine, and in a test against one that is made up.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from exaserve_ops.validation.domain.tuning import Forecast, Setting


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, greedy. Of `tokens` and `messages` one is given."""

    tokens: tuple[int, ...] = ()
    """A prompt for completion, as token ids."""
    messages: tuple[tuple[str, str], ...] = ()
    """A chat, as pairs of role and text."""
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    ignores_end: bool = False
    """Go on past the end-of-text token, so that the answer's length is known."""
    alternatives: int = 0
    """How many of the likeliest tokens are to be told at each place, with their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `None` and empty: the engine did not say."""

    status: int
    """Of HTTP; 0 where nothing came."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    ttft_seconds: float | None = None
    seconds: float = 0.0
    alternatives: tuple[Mapping[int, float], ...] = ()
    """At each place, log-probabilities by token id."""
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it was answered."""
        return self.status == 200 and not self.error  # noqa: PLR2004 - HTTP's own number

    @property
    def itl_seconds(self) -> float | None:
        """Mean time between its tokens."""
        after = len(self.token_ids) - 1
        if self.ttft_seconds is None or after < 1:
            return None
        return (self.seconds - self.ttft_seconds) / after


@dataclass(frozen=True, slots=True)
class AskAll:
    """Send requests, so many at once, and be sent their answers in the same order."""

    asks: tuple[Ask, ...]
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class LookAtLoad:
    """Be sent what the engine says of itself, newer than this look. An answer is a `Load`."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Let so many seconds pass with nothing asked."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LaunchAgain:
    """Have the replica ended and another one started, of the same release. An answer is a `Launched`."""


@dataclass(frozen=True, slots=True)
class LaunchWith:
    """Have it run with these engine options beside those of the run. An answer is a `Launched`.

    What runs with them already is left as it is.
    """

    options: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Launched:
    """Whether the replica became ready, or why it did not."""

    done: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class SetAsleep:
    """Have the replica put to sleep, or woken, and wait until it is. An answer is a `Slept`."""

    asleep: bool


@dataclass(frozen=True, slots=True)
class Slept:
    """Whether it sleeps, or is awake again, as was asked; or why not."""

    done: bool
    why: str = ""
    seconds: float | None = None
    """What waking took."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine says of itself. `None`: it does not."""

    kv_total_blocks: int | None = None
    kv_block_tokens: int | None = None
    kv_used_ratio: float | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found."""

    outcome: str
    """`passed`, `failed` or `skipped`."""
    figure: str = ""
    limit: str = ""
    why: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    """For the report: curves, tokens. Plain JSON."""


Need = AskAll | LookAtLoad | Rest | LaunchAgain | LaunchWith | SetAsleep
Reply = Sequence[Answer] | Load | Launched | Slept | None
Procedure = Generator[Need, Any, Finding]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is validated, and on what."""

    engine: str
    vocabulary: int
    """Number of token ids."""
    context_tokens: int
    """Longest context that the engine takes, prompt and answer."""
    forecast_tokens: tuple[int, int] | None = None
    """Tokens of KV memory that were planned for it, at least and at most; `None`: nothing was planned."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Engine options of the run."""
    may_borrow: bool = False
    """It leases from its node's pool what others leave: then it may have more than was planned for it."""
    most_at_once: int = 32
    """Where the concurrency ramp ends."""
    idle_seconds: float = 30.0
    shared_context_tokens: int | None = None
    """The smallest context of all engines of the run, so that they are asked the same; `None`: its own."""
    why_no_sleep: str = "it is not known whether its engine can sleep"
    """Empty: it can."""
    most_launches: int = 0
    """In the search for the best settings, beside what runs already; 0: none is made."""
    ttft_limit_seconds: float = 2.0
    itl_limit_seconds: float = 0.1
    forecasts: Mapping[Setting, Forecast] = field(default_factory=dict)
    """What the memory plan says of settings that may be tried."""
    seed: int = 0
    earlier: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Details of this engine's checks that have ended, by name."""
