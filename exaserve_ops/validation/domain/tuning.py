"""Which settings to launch next in the search for the best ones, and which are best. Pure.

A compass search from the run's own settings: one rung up or down at a time, always on from the best. It
needs few launches where throughput has one summit, which it has: too small a number leaves the device idle,
too large a one makes requests wait for one another's steps.

Machines are noisy, so each setting is measured in rounds, and one is better than another only where none
of its rounds is as bad as the other's best. Before it takes the other's place, both are launched and measured
once more in turn: launches differ, too, and a machine that became quicker meanwhile would make any newcomer
look better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from exaserve_ops.validation.domain.prompts import load_prompt_tokens

CLEAR_GAIN_RATIO = 1.03
"""Less than that is not worth a change, however little the rounds differ."""
_LADDER_RUNGS = 5
_TOKEN_RUNGS = (512, 1024, 2048, 4096, 8192, 16384)
OPTION_NAMES: Mapping[str, tuple[str, str]] = {
    "torch": ("max_num_seqs", "max_num_batched_tokens"),
    "vllm": ("max_num_seqs", "max_num_batched_tokens"),
    "sglang": ("max_running_requests", "chunked_prefill_size"),
    "simulated": ("max_num_seqs", ""),
}
"""What each engine calls the most requests at once, and the most tokens in a step; empty: it has none."""
_USUAL_SEQUENCES: Mapping[str, int] = {"torch": 64, "vllm": 256, "simulated": 64}
"""Requests at once of an engine that is not told; of others nobody knows, and more than are asked."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One pair. 0: the engine is not told, or has no such option."""

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

    def broken(self, ttft_p95_seconds: float | None, itl_seconds: float | None) -> tuple[str, ...]:
        """The limits that these exceed, as people call them."""
        looked_at = (
            ("TTFT p95", ttft_p95_seconds, self.ttft_seconds),
            ("time between tokens", itl_seconds, self.itl_seconds),
        )
        return tuple(name for name, took, most in looked_at if took is not None and took > most)


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of requests brought."""

    tokens_per_second: float
    ttft_p95_seconds: float | None = None
    itl_seconds: float | None = None

    def excess(self, limits: Limits) -> float:
        """By how many times the limit that is exceeded most is exceeded; 1 or less: it keeps within."""
        if self.ttft_p95_seconds is None:
            return float("inf")
        # Engines that answer with one token at once tell no time between tokens.
        return max(
            self.ttft_p95_seconds / limits.ttft_seconds, (self.itl_seconds or 0.0) / limits.itl_seconds
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """What a setting brought, over all of its launches. `why`: it did not start, or did not answer."""

    setting: Setting
    rounds: tuple[Round, ...] = ()
    why: str = ""
    launches: int = 1

    @property
    def tokens_per_second(self) -> float:
        """Of the middle round."""
        return median(one.tokens_per_second for one in self.rounds) if self.rounds else 0.0

    @property
    def spread_ratio(self) -> float:
        """By how much rounds lie off the middle, as a share of it: half of the way from worst to best."""
        rates = [one.tokens_per_second for one in self.rounds]
        middle = self.tokens_per_second
        return (max(rates) - min(rates)) / 2 / middle if middle else 0.0

    @property
    def ttft_p95_seconds(self) -> float | None:
        """Of the middle round."""
        return _median([one.ttft_p95_seconds for one in self.rounds])

    @property
    def itl_seconds(self) -> float | None:
        """Of the middle round."""
        return _median([one.itl_seconds for one in self.rounds])

    def keeps(self, limits: Limits) -> bool:
        """Whether it keeps within the limits in most rounds."""
        return not self.why and self._excess(limits) <= 1

    def is_clearly_better(self, other: Measured, limits: Limits) -> bool:
        """Whether no round of it is as bad as the other's best, in what counts.

        Keeping the limits counts first; where both do, tokens a second; where neither does, by how much
        they are exceeded.
        """
        if self.why or other.why:
            return not self.why
        if self.keeps(limits) and other.keeps(limits):
            worst = min(one.tokens_per_second for one in self.rounds)
            best = max(one.tokens_per_second for one in other.rounds)
            return worst > best and self.tokens_per_second > CLEAR_GAIN_RATIO * other.tokens_per_second
        if other.keeps(limits):
            return False
        return max(self._excesses(limits)) < min(other._excesses(limits))

    def joined(self, again: Measured) -> Measured:
        """With the rounds of another launch; one that did not start takes nothing away."""
        rounds = self.rounds + again.rounds
        return replace(self, rounds=rounds, why=self.why and again.why, launches=self.launches + 1)

    def _excesses(self, limits: Limits) -> list[float]:
        return [one.excess(limits) for one in self.rounds]

    def _excess(self, limits: Limits) -> float:
        return median(self._excesses(limits))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True, slots=True)
class Ladders:
    """What is tried of each, from few to many. The run's own settings are on them."""

    sequences: tuple[int, ...]
    tokens: tuple[int, ...] = (0,)
    own: Setting = Setting(0)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All pairs; a step with fewer tokens than requests is none, unless the run asks for it."""
        pairs = (Setting(s, t) for s in self.sequences for t in self.tokens)
        return tuple(one for one in pairs if not one.tokens or one.tokens >= one.sequences or one == self.own)

    def place_of(self, setting: Setting) -> tuple[int, int]:
        """Its rungs."""
        return self.sequences.index(setting.sequences), self.tokens.index(setting.tokens)


def ladders_of(
    engine: str, options: Mapping[str, Any], *, most_at_once: int, context_tokens: int
) -> Ladders | None:
    """What is tried on an engine; `None`: its options are not known. `options`: those of the run.

    Requests at once go down from the most that the run sends; more would never be reached.
    """
    names = OPTION_NAMES.get(engine)
    if names is None:
        return None
    told, told_tokens = (_number(options.get(name, 0)) for name in names)
    sequences = sorted({max(1, most_at_once >> rung) for rung in range(_LADDER_RUNGS)})
    reached = min(told or _USUAL_SEQUENCES.get(engine, most_at_once), most_at_once)
    sequences = [told if rung == reached else rung for rung in sorted({*sequences, reached})]
    own = Setting(told, max(0, told_tokens))
    if not names[1]:
        return Ladders(tuple(sequences), own=own)
    # A step never has more tokens than all prompts that are asked at once.
    most = most_at_once * load_prompt_tokens(context_tokens)
    tokens = [rung for rung in _TOKEN_RUNGS if rung < 2 * most] or [_TOKEN_RUNGS[0]]
    return Ladders(tuple(sequences), tuple(_with_own(tokens, told_tokens)), own)


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _with_own(rungs: list[int], told: int) -> list[int]:
    """The rungs with the run's own among them: in the middle where nobody says it, last where it is all."""
    if told > 0:
        return sorted({*rungs, told})
    place = len(rungs) if told < 0 else len(rungs) // 2
    return [*rungs[:place], 0, *rungs[place:]]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a search has found so far."""

    best: Measured
    """The run's own settings, until another is clearly better over two launches of each."""
    challenger: Measured | None = None
    """Is clearly better so far."""
    due: Setting | None = None
    """Which of both is to be launched again."""


def standing_of(launched: Sequence[Measured], limits: Limits) -> Standing | None:
    """Where a search stands after these launches, of which the first has the run's own settings."""
    if not launched:
        return None
    standing = Standing(launched[0])
    for one in launched[1:]:
        standing = _after(standing, one, limits)
    return standing


def _after(standing: Standing, one: Measured, limits: Limits) -> Standing:
    best, challenger = standing.best, standing.challenger
    if challenger is None:
        if not one.is_clearly_better(best, limits):
            return standing
        # Of what brought nothing there is nothing to be measured again.
        return Standing(one) if best.why else Standing(best, one, best.setting)
    was_best = standing.due == best.setting
    best, challenger = (best.joined(one), challenger) if was_best else (best, challenger.joined(one))
    if not challenger.is_clearly_better(best, limits):
        return Standing(best)
    return Standing(best, challenger, challenger.setting) if was_best else Standing(challenger)


def next_setting(
    ladders: Ladders, launched: Sequence[Measured], limits: Limits, forbidden: Mapping[Setting, str]
) -> Setting | None:
    """The setting to launch next; `None`: no neighbour of the best one is unknown.

    `forbidden`: settings that are not worth a launch, with the reason.
    """
    standing = standing_of(launched, limits)
    if standing is None:
        return ladders.own
    if standing.due is not None:
        return standing.due
    known = {one.setting for one in launched}
    best = standing.best
    order = _outwards(ladders) if best.why else _neighbours(ladders, best.setting)
    return next((one for one in order if one not in known and one not in forbidden), None)


def joined(launched: Sequence[Measured]) -> tuple[Measured, ...]:
    """One for each setting, with the rounds of all of its launches, in the order of the first ones."""
    found: dict[Setting, Measured] = {}
    for one in launched:
        before = found.get(one.setting)
        found[one.setting] = one if before is None else before.joined(one)
    return tuple(found.values())


def _outwards(ladders: Ladders) -> list[Setting]:
    """All settings, those nearest to the run's own first, the smaller of two first."""
    middle = ladders.place_of(ladders.own)

    def distance(setting: Setting) -> tuple[int, tuple[int, int]]:
        place = ladders.place_of(setting)
        return abs(place[0] - middle[0]) + abs(place[1] - middle[1]), place

    return sorted(ladders.settings, key=distance)


def _neighbours(ladders: Ladders, setting: Setting) -> list[Setting]:
    """One rung more of requests, then of tokens; then one less."""
    place = ladders.place_of(setting)
    steps = ((1, 0), (0, 1), (0, -1), (-1, 0))
    found = [
        Setting(ladders.sequences[s], ladders.tokens[t])
        for s, t in ((place[0] + ds, place[1] + dt) for ds, dt in steps)
        if 0 <= s < len(ladders.sequences) and 0 <= t < len(ladders.tokens)
    ]
    valid = set(ladders.settings)
    return [one for one in found if one in valid]
