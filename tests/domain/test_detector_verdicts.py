"""The failure detector: quick, and slow to believe the worst."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.health.domain.detector import DetectorSettings, Sighting, Verdict, assess_node
from exaserve_ops.inventory.domain.liveness import ALIVE, DEAD, JOINING, NODE_LIVENESS, SUSPECT

SETTINGS = DetectorSettings()
TICK_SECONDS = 0.25
delays = st.floats(0.0, 0.89)


def watch(arrivals: list[float], until: float, *, start: Sighting) -> list[tuple[float, Verdict]]:
    """Assess each quarter of a second, as a controller does, and follow the verdicts."""
    sighting, verdicts, now, pending = start, [], 100.0, sorted(arrivals)
    while now <= until:
        while pending and pending[0] <= now:
            dead = sighting.liveness == DEAD
            sighting = replace(
                sighting,
                last_report_seconds=pending.pop(0),
                reports_since_dead=sighting.reports_since_dead + 1 if dead else 0,
            )
        verdict = assess_node(sighting, now, SETTINGS)
        if verdict is not None:
            verdicts.append((now, verdict))
            sighting = replace(sighting, liveness=NODE_LIVENESS.next(sighting.liveness, verdict.event))
        now += TICK_SECONDS
    return verdicts


ALIVE_NODE = Sighting(ALIVE, 100.0, 0, 90.0)


@given(st.lists(delays, min_size=5, max_size=60))
def test_late_reports_change_nothing(late: list[float]) -> None:
    arrivals = [101.0 + index + delay for index, delay in enumerate(late)]
    assert watch(arrivals, 100.0 + len(late), start=ALIVE_NODE) == []


@given(st.lists(st.tuples(delays, st.booleans()), min_size=5, max_size=60))
def test_single_losses_on_top_never_look_like_death(reports: list[tuple[float, bool]]) -> None:
    arrivals, lost_before = [], False
    for index, (delay, lose) in enumerate(reports):
        lost_before = lose and not lost_before
        if not lost_before:
            arrivals.append(101.0 + index + delay)
    verdicts = watch(arrivals, 99.0 + len(reports), start=ALIVE_NODE)
    assert {verdict.event for _, verdict in verdicts} <= {"missed", "reported"}


@given(st.floats(0.0, 20.0))
def test_dead_after_exactly_three_misses(silence: float) -> None:
    verdict = assess_node(ALIVE_NODE, 100.0 + silence, SETTINGS)
    grace = SETTINGS.grace_ratio
    expected = "lost" if silence >= 3 + grace else "missed" if silence >= 2 + grace else None
    assert (verdict.event if verdict else None) == expected


@pytest.mark.parametrize("liveness", [JOINING, ALIVE, SUSPECT, DEAD])
@given(before=st.floats(0.0, 1e6), since=st.floats(0.0, 2.49))
def test_silence_before_watching_proves_nothing(liveness: str, before: float, since: float) -> None:
    """A controller that just started, or could not listen, blames nobody for what it did not hear."""
    now = 2e6
    sighting = Sighting(liveness, now - since - before - 1.0, 0, now - since)
    verdict = assess_node(sighting, now, SETTINGS)
    assert verdict is None or verdict.event == "reported"


def test_a_node_that_never_reported_stays_joining() -> None:
    assert assess_node(Sighting(JOINING, None, 0, 0.0), 1e6, SETTINGS) is None


def test_the_dead_come_back_after_two_reports_in_a_row_and_not_after_one() -> None:
    one = Sighting(DEAD, 100.0, 1, 90.0)
    assert assess_node(one, 100.1, SETTINGS) is None
    two = assess_node(replace(one, reports_since_dead=2), 100.1, SETTINGS)
    assert two == Verdict("recovered", "2 reports in a row arrived")


def test_death_return_and_second_death_are_each_told_once() -> None:
    verdicts = watch([110.0, 111.0, 112.0], 120.0, start=ALIVE_NODE)
    assert [verdict.event for _, verdict in verdicts] == ["missed", "lost", "recovered", "missed", "lost"]


@given(
    st.sampled_from(NODE_LIVENESS.statuses),
    st.one_of(st.none(), st.floats(1.0, 1000.0)),
    st.integers(0, 5),
    st.floats(1.0, 1000.0),
    st.floats(1000.0, 2000.0),
)
def test_every_verdict_applies_to_the_status_it_was_given_for(
    liveness: str, last: float | None, reports: int, watching: float, now: float
) -> None:
    verdict = assess_node(Sighting(liveness, last, reports, watching), now, SETTINGS)
    if verdict is not None:
        assert NODE_LIVENESS.allows(liveness, verdict.event)
        assert verdict.evidence
