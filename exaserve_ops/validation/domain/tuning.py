"""Which settings to launch next in the search for the best ones, and which are best. Pure.

A compass search: from the middle of both ladders one rung up or down at a time, always on from the best that
was measured. It needs few launches where throughput has one summit, which it has: too small a number leaves
the device idle, too large a one makes requests wait for one another's steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLEAR_GAIN_RATIO = 1.03
"""Less than that is noise: the smaller setting is as good."""
_LADDER_RUNGS = 5
_TOKEN_RUNGS = (512, 1024, 2048, 4096, 8192, 16384)
OPTION_NAMES: Mapping[str, tuple[str, str]] = {
    "torch": ("max_num_seqs", "max_num_batched_tokens"),
    "vllm": ("max_num_seqs", "max_num_batched_tokens"),
    "sglang": ("max_running_requests", "chunked_prefill_size"),
    "simulated": ("max_num_seqs", ""),
}
"""What each engine calls the most requests at once, and the most tokens in a step; empty: it has none."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One pair. `tokens` 0: the engine has no such option."""

    sequences: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the memory plan says of a setting before it is launched."""

    verdict: str = ""
    """`fits`, `tight`, `does not fit`; empty: nothing is planned."""
    needed_bytes: int | None = None
    """On each accelerator."""
    why: str = ""

    @property
    def forbids(self) -> bool:
        """Whether it is not worth a launch."""
        return self.verdict == "does not fit"


@dataclass(frozen=True, slots=True)
class Limits:
    """What answers may take at most."""

    ttft_seconds: float
    """Of 19 in 20 first tokens."""
    itl_seconds: float
    """Between two tokens, of half of the answers."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a setting brought. `why`: it was not launched, or did not answer."""

    setting: Setting
    tokens_per_second: float = 0.0
    ttft_p95_seconds: float | None = None
    itl_seconds: float | None = None
    why: str = ""

    def excess(self, limits: Limits) -> float:
        """By how many times the limit that is exceeded most is exceeded; 1 or less: it keeps within."""
        if self.why or self.ttft_p95_seconds is None:
            return float("inf")
        # Engines that answer with one token at once tell no time between tokens.
        return max(
            self.ttft_p95_seconds / limits.ttft_seconds, (self.itl_seconds or 0.0) / limits.itl_seconds
        )

    def broken(self, limits: Limits) -> tuple[str, ...]:
        """The limits that it exceeds, as people call them."""
        looked_at = (
            ("TTFT p95", self.ttft_p95_seconds, limits.ttft_seconds),
            ("time between tokens", self.itl_seconds, limits.itl_seconds),
        )
        return tuple(name for name, took, most in looked_at if took is not None and took > most)


@dataclass(frozen=True, slots=True)
class Ladders:
    """What is tried of each."""

    sequences: tuple[int, ...]
    tokens: tuple[int, ...] = (0,)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All pairs; a step with fewer tokens than requests is none."""
        return tuple(Setting(s, t) for s in self.sequences for t in self.tokens if not t or t >= s)


def ladders_of(engine: str, *, most_at_once: int, context_tokens: int) -> Ladders | None:
    """What is tried on an engine; `None`: its options are not known.

    Requests at once go down from the most that the run sends; more would never be reached.
    """
    names = OPTION_NAMES.get(engine)
    if names is None:
        return None
    sequences = sorted({max(1, most_at_once >> rung) for rung in range(_LADDER_RUNGS)})
    if not names[1]:
        return Ladders(tuple(sequences))
    # A step never has more tokens than all that are asked at once.
    most = most_at_once * context_tokens
    tokens = [rung for rung in _TOKEN_RUNGS if rung < 2 * most] or [_TOKEN_RUNGS[0]]
    return Ladders(tuple(sequences), tuple(tokens))


def next_setting(
    ladders: Ladders, measured: Sequence[Measured], limits: Limits, forbidden: Mapping[Setting, str]
) -> Setting | None:
    """The setting to launch next; `None`: no neighbour of the best one is unknown.

    `forbidden`: settings that are not worth a launch, with the reason.
    """
    known = {one.setting for one in measured}
    best = best_of(measured, limits)
    order = _from_the_middle(ladders) if best is None or best.why else _neighbours(ladders, best.setting)
    free = (setting for setting in order if setting not in known and setting not in forbidden)
    return next(free, None)


def best_of(measured: Sequence[Measured], limits: Limits) -> Measured | None:
    """The most tokens a second within the limits; where none keeps them, what exceeds them least.

    Of two that are nearly as good the smaller one.
    """
    best: Measured | None = None
    for one in sorted(measured, key=lambda m: (m.setting.sequences, m.setting.tokens)):
        if best is None or _is_better(one, best, limits):
            best = one
    return best


def _is_better(one: Measured, other: Measured, limits: Limits) -> bool:
    mine, theirs = one.excess(limits), other.excess(limits)
    if mine <= 1 and theirs <= 1:
        return one.tokens_per_second > CLEAR_GAIN_RATIO * other.tokens_per_second
    return mine < theirs


def _from_the_middle(ladders: Ladders) -> list[Setting]:
    """All settings, those nearest to the middle first, the smaller of two first."""
    middle = (len(ladders.sequences) // 2, len(ladders.tokens) // 2)

    def distance(setting: Setting) -> tuple[int, int, int]:
        place = ladders.sequences.index(setting.sequences), ladders.tokens.index(setting.tokens)
        return (
            abs(place[0] - middle[0]) + abs(place[1] - middle[1]),
            setting.sequences,
            setting.tokens,
        )

    return sorted(ladders.settings, key=distance)


def _neighbours(ladders: Ladders, setting: Setting) -> list[Setting]:
    """One rung up, then down, of requests; then of tokens."""
    place = ladders.sequences.index(setting.sequences), ladders.tokens.index(setting.tokens)
    steps = ((1, 0), (-1, 0), (0, 1), (0, -1))
    found = [
        Setting(ladders.sequences[s], ladders.tokens[t])
        for s, t in ((place[0] + ds, place[1] + dt) for ds, dt in steps)
        if 0 <= s < len(ladders.sequences) and 0 <= t < len(ladders.tokens)
    ]
    valid = set(ladders.settings)
    return [one for one in found if one in valid]
