"""An hour of a bad network kills nobody, and a dead node is found out as quickly as on a good one.

Reports and pulses of one node after another, in virtual time, through the very bookkeeping that
controllers use; each may be lost and each may be late by most of its interval.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.controllers.fleet_state import NodeView
from exaserve_ops.health.domain.detector import (
    DetectorSettings,
    SeenPulse,
    Sighting,
    Verdict,
    assess_node,
    needed_reports,
    needed_signs,
)
from exaserve_ops.health.domain.loss import LossCount, fleet_loss
from exaserve_ops.inventory.domain.liveness import ALIVE, DEAD, NODE_LIVENESS

SETTINGS = DetectorSettings()
TICK_SECONDS = 0.25
HOUR_SECONDS = 3600.0
Signs = Iterator[tuple[float, int]]


@dataclass(frozen=True)
class Weather:
    """What the network does to each message."""

    loss_ratio: float = 0.0
    jitter_ratio: float = 0.0
    pulses: bool = True


def arrivals(rng: random.Random, weather: Weather, interval: float, until: float) -> list[tuple[float, int]]:
    """When the signs of one kind arrive, and their numbers."""
    signs = []
    for number in range(1, int(until / interval) + 1):
        late = rng.random() * weather.jitter_ratio * interval
        if rng.random() >= weather.loss_ratio:
            signs.append((number * interval + late, number))
    return signs


def watch(
    seed: int, weather: Weather, *, alive_until: float, until: float, fleet_loss_ratio: float = 0.0
) -> list[tuple[float, Verdict]]:
    """Follow one node from its first report on; it ends at `alive_until`. Returns every verdict.

    `fleet_loss_ratio` is what other nodes' reports tell of the network; 0: this node is alone in it.
    """
    rng = random.Random(seed)  # noqa: S311 - a model, not a secret
    reports = iter(arrivals(rng, weather, 1.0, alive_until))
    pulses = iter(arrivals(rng, weather, 0.5, alive_until) if weather.pulses else [])
    view = NodeView("n", liveness=ALIVE)
    view.hear_heartbeat("boot", 0, 0.0)
    view.hear(0.0, 0.0)
    verdicts: list[tuple[float, Verdict]] = []
    next_report, next_pulse, pulse = next(reports, None), next(pulses, None), None
    for tick in range(int(until / TICK_SECONDS)):
        now = tick * TICK_SECONDS
        while next_report is not None and next_report[0] <= now:
            view.hear_heartbeat("boot", next_report[1], next_report[0])
            view.hear(*next_report)
            next_report = next(reports, None)
        while next_pulse is not None and next_pulse[0] <= now:
            pulse, next_pulse = next_pulse, next(pulses, None)
        silence = now - (view.last_report_seconds or 0.0)
        if silence < 1.25 and view.liveness == ALIVE:
            continue
        if pulse is not None:
            view.hear_pulse(SeenPulse("boot", pulse[1], now - pulse[0]), now)
        verdict = assess_node(sighting_of(view, fleet_loss_ratio), now, SETTINGS)
        if verdict is not None:
            verdicts.append((now, verdict))
            view.liveness = NODE_LIVENESS.next(view.liveness, verdict.event)
            if verdict.event == "lost":
                view.note_death(now)
    return verdicts


def sighting_of(view: NodeView, fleet_loss_ratio: float) -> Sighting:
    return Sighting(
        liveness=view.liveness,
        last_report_seconds=view.last_report_seconds,
        reports_since_dead=view.reports_since_dead,
        watching_since_seconds=0.0,
        last_pulse_seconds=view.last_pulse_seconds,
        loss_ratio=max(view.loss.ratio, fleet_loss_ratio),
        recent_deaths=len(view.deaths_seconds),
    )


def events(verdicts: list[tuple[float, Verdict]]) -> list[str]:
    return [verdict.event for _, verdict in verdicts]


BAD = Weather(loss_ratio=0.1, jitter_ratio=0.9)


@pytest.mark.parametrize("seed", range(24))
def test_an_hour_of_loss_and_jitter_kills_nobody_and_rarely_worries(seed: int) -> None:
    said = events(watch(seed, BAD, alive_until=HOUR_SECONDS, until=HOUR_SECONDS))
    assert "lost" not in said
    assert said.count("missed") <= 2


@pytest.mark.parametrize("seed", range(8))
def test_an_agent_without_a_pulse_is_judged_more_slowly_instead_of_wrongly(seed: int) -> None:
    weather = replace(BAD, pulses=False)
    said = events(watch(seed, weather, alive_until=HOUR_SECONDS, until=HOUR_SECONDS))
    assert "lost" not in said


@given(st.integers(0, 10_000), st.floats(20.0, 30.0), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_death_in_a_clean_network_is_told_once_within_four_seconds(
    seed: int, death: float, pulses: bool
) -> None:
    weather = Weather(jitter_ratio=0.1, pulses=pulses)
    verdicts = watch(seed, weather, alive_until=death, until=death + 30)
    assert events(verdicts) == ["missed", "lost"]
    assert verdicts[-1][0] - death <= 4.0


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_death_in_a_bad_network_is_found_out_too(seed: int) -> None:
    """In a fleet: a node that is alone has to learn first what its network loses."""
    verdicts = watch(seed, BAD, alive_until=200.0, until=230.0, fleet_loss_ratio=BAD.loss_ratio)
    deaths = [at for at, verdict in verdicts if verdict.event == "lost"]
    assert len(deaths) == 1
    assert 200.0 < deaths[0] <= 207.0


def test_pulses_without_reports_keep_a_node_only_so_long() -> None:
    quiet = Sighting(ALIVE, 100.0, 0, 0.0, last_pulse_seconds=109.9)
    assert assess_node(quiet, 110.0, SETTINGS) is None
    mute = replace(quiet, last_pulse_seconds=115.9)
    verdict = assess_node(mute, 116.0, SETTINGS)
    assert verdict is not None
    assert verdict.event == "lost"


def test_an_old_pulse_written_again_is_no_sign_of_life() -> None:
    view = NodeView("n")
    view.hear_pulse(SeenPulse("boot", 7, 0.1), 50.0)
    view.hear_pulse(SeenPulse("boot", 7, 0.0), 60.0)
    view.hear_pulse(SeenPulse("boot", 6, 0.0), 61.0)
    assert view.last_pulse_seconds == pytest.approx(49.9)


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_more_loss_never_needs_fewer_signs(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert needed_signs(low, SETTINGS.dead_chance, SETTINGS) <= needed_signs(
        high, SETTINGS.dead_chance, SETTINGS
    )
    assert needed_signs(0.0, SETTINGS.dead_chance, SETTINGS) == SETTINGS.dead_after_misses


def test_a_node_that_keeps_dying_must_stay_up_longer_each_time() -> None:
    needed = [needed_reports(deaths, SETTINGS) for deaths in range(1, 8)]
    assert needed == [2, 4, 8, 16, 32, 32, 32]
    back = Sighting(DEAD, 100.0, 3, 0.0, recent_deaths=2)
    assert assess_node(back, 100.1, SETTINGS) is None
    assert assess_node(replace(back, reports_since_dead=4), 100.1, SETTINGS) is not None


def test_reports_with_a_gap_between_them_are_not_in_a_row() -> None:
    view = NodeView("n", liveness=DEAD)
    for at in (1.0, 2.0, 9.0):
        view.hear_heartbeat("boot", int(at), at)
        view.hear(at, at)
    assert view.reports_since_dead == 1


@given(st.lists(st.booleans(), min_size=1, max_size=400))
def test_loss_is_read_off_the_numbers_and_long_silence_is_no_loss(arrived: list[bool]) -> None:
    count, last = LossCount(), 0
    for number, came in enumerate(arrived, start=1):
        if came:
            count, last = count.after(last, number), number
    assert 0.0 <= count.ratio < 1.0
    assert count.after(last, last + 1000).lost <= count.lost


def test_loss_that_one_node_cannot_know_yet_is_learnt_from_the_fleet() -> None:
    seasoned = LossCount()
    for number in range(2, 400, 2):
        seasoned = seasoned.after(number - 2, number)
    assert seasoned.ratio > 0.3
    assert fleet_loss([seasoned, LossCount()]) > 0.3
    assert LossCount().ratio == 0.0
