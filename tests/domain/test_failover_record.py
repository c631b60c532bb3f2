"""How the failover benchmark turns what it saw into figures."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.failing.record import (
    Asked,
    Death,
    TableChange,
    Verdict,
    combine,
    follow_tables,
    judge,
    match_verdicts,
    quantile,
    summarize,
)

DEATH = Death("n1", "node-1", 10.0, until=30.0)
TABLE = {"a": "n1", "b": "n1", "c": "n2", "d": "n3"}


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_quantile_is_one_of_the_values_and_enough_of_them_are_no_larger(
    values: list[float], share: float
) -> None:
    found = quantile(values, share)
    assert found is not None
    assert any(found == round(value, 3) for value in values)
    assert sum(round(value, 3) <= found for value in values) >= share * len(values) - 1e-9


def test_quantile_takes_what_is_known_and_has_none_of_nothing() -> None:
    assert quantile([None, 2.0, None, 1.0], 0.99) == 2.0
    assert quantile([None], 0.5) is None
    assert quantile(range(1, 101), 0.99) == 99


def test_verdict_belongs_to_the_newest_death_of_its_node() -> None:
    again = replace(DEATH, at=50.0, until=70.0)
    found, unexplained = match_verdicts(
        [again, DEATH], [Verdict("n1", 53.5), Verdict("n1", 13.0), Verdict("n1", 15.0)]
    )
    assert found == {DEATH: 3.0, again: 3.5}
    assert unexplained == []


@pytest.mark.parametrize(
    "verdict",
    [Verdict("n2", 13.0), Verdict("n1", 9.9), Verdict("n1", 35.1)],
    ids=["another node", "before its death", "long after its return"],
)
def test_verdict_that_no_death_explains_is_false(verdict: Verdict) -> None:
    found, unexplained = match_verdicts([DEATH], [verdict])
    assert (found, unexplained) == ({}, [verdict])


def test_death_without_an_end_explains_every_later_verdict() -> None:
    assert match_verdicts([replace(DEATH, until=None)], [Verdict("n1", 1e6)])[1] == []


def test_node_is_withdrawn_with_the_last_of_its_replicas() -> None:
    changes = [TableChange(12.0, lost={"a": "n1"}), TableChange(13.0, lost={"b": "n1"})]
    loss = follow_tables(TABLE, changes, [DEATH])[DEATH]
    assert loss.withdrawn_at == 13.0
    assert loss.replicas == {"a", "b"}
    assert loss.filled_at == []


def test_standby_that_was_promoted_on_the_dead_node_is_withdrawn_with_the_rest() -> None:
    changes = [
        TableChange(11.0, lost={"c": "n2"}, gained={"s": "n1"}),
        TableChange(13.0, lost={"a": "n1", "b": "n1"}),
        TableChange(13.5, lost={"s": "n1"}),
        TableChange(14.0, gained={"e": "n4", "f": "n4", "g": "n4"}),
    ]
    loss = follow_tables(TABLE, changes, [DEATH])[DEATH]
    assert loss.withdrawn_at == 13.5
    assert loss.filled_at == [14.0, 14.0]


def test_whoever_comes_takes_the_place_that_was_empty_longest() -> None:
    other = Death("n3", "node-3", 11.0)
    changes = [
        TableChange(13.0, lost={"a": "n1", "b": "n1"}),
        TableChange(14.0, lost={"d": "n3"}, gained={"e": "n4"}),
        TableChange(15.0, gained={"f": "n4", "g": "n5"}),
    ]
    losses = follow_tables(TABLE, changes, [other, DEATH])
    assert losses[DEATH].filled_at == [14.0, 15.0]
    assert losses[other].filled_at == [15.0]


def test_stand_in_of_the_same_write_counts_as_at_once() -> None:
    changes = [TableChange(13.0, lost={"a": "n1", "b": "n1"}, gained={"e": "n4", "f": "n4"})]
    loss = follow_tables(TABLE, changes, [DEATH])[DEATH]
    assert (loss.withdrawn_at, loss.filled_at) == (13.0, [13.0, 13.0])


def test_place_that_no_death_emptied_is_filled_and_counted_for_nobody() -> None:
    changes = [
        TableChange(11.0, lost={"c": "n2"}),
        TableChange(13.0, lost={"a": "n1", "b": "n1"}),
        TableChange(14.0, gained={"c": "n2", "e": "n4"}),
    ]
    assert follow_tables(TABLE, changes, [DEATH])[DEATH].filled_at == [14.0]


def test_changes_before_a_death_only_say_what_the_node_had() -> None:
    changes = [TableChange(5.0, lost={"a": "n1"}, gained={"x": "n1"})]
    loss = follow_tables(TABLE, changes, [DEATH, replace(DEATH, at=4.0)])
    assert loss == {replace(DEATH, at=4.0): loss[replace(DEATH, at=4.0)]}  # the later one saw no change yet
    later = [*changes, TableChange(13.0, lost={"b": "n1", "x": "n1"})]
    assert follow_tables(TABLE, later, [DEATH])[DEATH].replicas == {"b", "x"}


@given(st.integers(0, 10_000))
def test_no_place_is_filled_twice_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a model, not a secret
    table = {f"r{number}": f"n{number % 5}" for number in range(20)}
    known, changes = dict(table), []
    for step in range(30):
        lost = {
            name: known.pop(name) for name in rng.sample(sorted(known), min(len(known), rng.randint(0, 3)))
        }
        gained = {f"s{step}-{n}": f"n{rng.randint(0, 9)}" for n in range(rng.randint(0, 3))}
        known |= gained
        changes.append(TableChange(float(step), gained, lost))
    deaths = [Death(f"n{n}", "", rng.uniform(0, 30)) for n in range(5)]
    losses = follow_tables(table, changes, deaths)
    assert all(len(loss.filled_at) <= len(loss.replicas) for loss in losses.values())
    assert sum(len(loss.filled_at) for loss in losses.values()) <= sum(len(c.gained) for c in changes)
    assert all(at >= death.at for death, loss in losses.items() for at in loss.filled_at)


def pinned(**changes: object) -> Asked:
    asked = Asked("pinned", 10.1, first_byte_at=12.0, ended_at=12.5, status=200, node_id="n2", death="n1")
    return replace(asked, **changes)  # type: ignore[arg-type]  # the fields are named by the tests


def test_reroute_is_the_later_of_withdrawal_and_answer() -> None:
    losses = follow_tables(TABLE, [TableChange(13.0, lost={"a": "n1", "b": "n1"})], [DEATH])
    [outcome], _ = judge([DEATH], [Verdict("n1", 12.9)], losses, [pinned()])
    assert (outcome.withdrawn_seconds, outcome.answered_seconds) == (3.0, 2.0)
    assert outcome.reroute_seconds == 3.0
    [late], _ = judge([DEATH], [], losses, [pinned(first_byte_at=14.0)])
    assert (late.detect_seconds, late.reroute_seconds) == (None, 4.0)


@pytest.mark.parametrize(
    "asked",
    [
        pinned(node_id="n1"),
        pinned(started_at=9.9),
        pinned(started_at=31.0),
        pinned(death="n9"),
        pinned(status=503, error="503"),
    ],
    ids=["by the dead node", "before", "after its return", "of another death", "an error"],
)
def test_answer_that_proves_no_reroute_is_left_out(asked: Asked) -> None:
    losses = follow_tables(TABLE, [TableChange(13.0, lost={"a": "n1", "b": "n1"})], [DEATH])
    [outcome], _ = judge([DEATH], [], losses, [asked])
    assert outcome.reroute_seconds is None


def test_error_before_any_byte_has_failed_and_one_after_it_has_broken_off() -> None:
    refused = Asked("new", 11.0, first_byte_at=11.5, status=503, error="503 unreachable")
    silent = Asked("new", 11.0, error="TimeoutError")
    broken = Asked("new", 11.0, first_byte_at=11.5, status=200, error="the stream ended without [DONE]")
    early = replace(silent, started_at=9.0)
    [outcome], _ = judge([DEATH], [], {}, [])
    figures = summarize([outcome], [refused, silent, broken, early, pinned()], [Verdict("n7", 1.0)])
    assert (figures["failed_new_requests"], figures["broken_streams"], figures["requests"]) == (2, 1, 4)
    assert figures["errors"] == {"503 unreachable": 1, "TimeoutError": 1}
    assert figures["false_deaths"] == 1
    assert figures["deaths_not_detected"] == 1


def test_whole_shows_the_worst_times_and_the_sum_of_counts() -> None:
    parts: dict[str, dict[str, Any]] = {
        "simulated": {"detect_p99_seconds": 3.5, "failed_new_requests": 1, "false_deaths": 0},
        "real": {"detect_p99_seconds": 3.9, "failed_new_requests": 2, "false_deaths": 0},
        "quiet": {"false_deaths": 4},
    }
    whole = combine(parts)
    assert (whole["detect_p99_seconds"], whole["failed_new_requests"], whole["false_deaths"]) == (3.9, 3, 4)
    assert whole["standby_p99_seconds"] is None
