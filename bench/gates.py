"""How often gates turn a harmless release back, and how soon they catch a slow one.

`python -m bench.gates --json` draws answers of an old and a new release and has the gates look at them as a
rollout does: again and again while they come in, in every wave of it. Durations are log-normal, from narrow
to heavy-tailed.

`rolled_back_ratio` is the share of rollouts that a gate of durations turned back; `held_ratio` that of those
that were held at the end of any wave; `answers_p50` and `answers_p95` are how many answers of the new release
it took to turn back.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from exaserve_ops.rollouts.domain.gates import CLOSED, NO_DATA, TTFT, Answers, Gate, Health, judge
from exaserve_ops.rollouts.domain.policy import RolloutPolicy
from exaserve_ops.rollouts.domain.spread_of_values import bucket_of

MEDIAN_SECONDS = 0.5
SPREADS = (0.3, 0.6, 1.0, 1.5)
"""Of the logarithm: with 0.3 the p95 is 1.6 times the median, with 1.5 it is 12 times."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of rollout that is drawn."""

    spread: float
    slowness: float = 1.0
    """How many times as long answers of the new release take."""
    waves: int = 10
    answers_a_wave: int = 200
    """Of the new release, while its wave is watched."""
    old_to_new: float = 3.0
    """Answers of the old release for each of the new one."""
    look_every: int = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of drawing one setting many times."""

    setting: Setting
    rollouts: int
    rolled_back_ratio: float
    held_ratio: float
    answers_p50: int | None = None
    answers_p95: int | None = None


@dataclass(frozen=True, slots=True)
class Course:
    """How one drawn rollout went."""

    rolled_back: bool = False
    held: bool = False
    answers: int = 0
    """Of the new release, until it was turned back."""


def looks(chance: random.Random, setting: Setting) -> Iterator[tuple[int, Gate]]:
    """One wave: what the gate of TTFT says each time it is looked at, with the answers so far."""
    policy = RolloutPolicy()
    new: Counter[int] = Counter()
    old: Counter[int] = Counter()
    for count in range(1, setting.answers_a_wave + 1):
        new[_draw(chance, setting)] += 1
        for _ in range(round(setting.old_to_new)):
            old[_draw(chance, replace(setting, slowness=1.0))] += 1
        if count % setting.look_every == 0:
            gates = judge(_answers(new), _answers(old), Health(1, 1), policy)
            yield count, next(gate for gate in gates if gate.name == TTFT)


def roll(chance: random.Random, setting: Setting) -> Course:
    """One rollout: turned back as soon as the gate closes in any wave."""
    held = False
    for _ in range(setting.waves):
        state = NO_DATA
        for count, gate in looks(chance, setting):
            state = gate.state
            if state == CLOSED:
                return Course(rolled_back=True, answers=count)
        held |= state == NO_DATA
    return Course(held=held)


def figures_of(setting: Setting, rollouts: int, *, seed: int = 1) -> Figures:
    """Draw one setting so many times."""
    chance = random.Random(seed)  # noqa: S311 - drawn anew the same in every run
    courses = [roll(chance, setting) for _ in range(rollouts)]
    caught = sorted(course.answers for course in courses if course.rolled_back)
    return Figures(
        setting,
        rollouts,
        rolled_back_ratio=len(caught) / rollouts,
        held_ratio=sum(course.held for course in courses) / rollouts,
        answers_p50=caught[len(caught) // 2] if caught else None,
        answers_p95=caught[len(caught) * 95 // 100] if caught else None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Draw harmless and slow releases."""
    parser = argparse.ArgumentParser(prog="bench.gates", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    settings = [Setting(spread) for spread in SPREADS]
    settings += [Setting(spread, slowness, waves=1) for slowness in (2.0, 3.0) for spread in SPREADS]
    for setting in settings:
        found = figures_of(setting, arguments.rollouts)
        text = json.dumps(asdict(found)) if arguments.json else str(found)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    return 0


def _draw(chance: random.Random, setting: Setting) -> int:
    return bucket_of(MEDIAN_SECONDS * setting.slowness * chance.lognormvariate(0.0, setting.spread))


def _answers(buckets: Counter[int]) -> Answers:
    return Answers(buckets.total(), 0, {"stream:64": buckets})


if __name__ == "__main__":
    sys.exit(main())
