"""Words, units and figures: pure functions."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest

from exaserve_ops.dashboard.figures import Panel, by_minute, small_multiples, sparkline_points
from exaserve_ops.dashboard.wording import (
    badge_of,
    byte_size,
    clock_words,
    count_words,
    duration,
    number,
    option_value,
    percent,
)
from exaserve_ops.inventory.domain.liveness import NODE_LIVENESS
from exaserve_ops.lib.lifecycle import Lifecycle
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA

NOON = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize("lifecycle", [NODE_LIVENESS, REPLICA, DEPLOYMENT], ids=lambda x: x.name)
def test_each_status_has_a_look_of_its_own_chosen_on_purpose(lifecycle: Lifecycle) -> None:
    for status in lifecycle.statuses:
        badge = badge_of(lifecycle.name, status)
        assert badge.meaning == lifecycle.meanings[status]
        assert badge.word == status.replace("_", " ")
    bad = {s for s in lifecycle.statuses if badge_of(lifecycle.name, s).tone == "bad"}
    good = {s for s in lifecycle.statuses if badge_of(lifecycle.name, s).tone == "good"}
    shapes = [{badge_of(lifecycle.name, s).shape for s in group} for group in (bad, good)]
    assert not shapes[0] & shapes[1], "colour alone would tell good from bad"


def test_an_unknown_status_does_not_look_like_good_news() -> None:
    assert badge_of("replica", "from_a_later_version").tone == "idle"


@pytest.mark.parametrize("write", [number, percent, duration, byte_size, count_words])
def test_a_missing_value_is_never_written_as_zero(write: object) -> None:
    assert "0" not in write(None)  # type: ignore[operator]  # five functions of one shape


@pytest.mark.parametrize("write", [number, percent, duration])
def test_not_a_number_is_said(write: object) -> None:
    assert write(math.nan) == "NaN"  # type: ignore[operator]  # three functions of one shape


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0004, "0 ms"),
        (0.84, "840 ms"),
        (9.94, "9.9 s"),
        (59.6, "1 min"),
        (245, "4 min 5 s"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds).replace("\u202f", " ") == words


def test_units_use_thin_spaces() -> None:
    assert byte_size(8 << 30) == "8\u202fGiB"
    assert number(12345) == "12\u202f345"
    assert percent(0.043) == "4.3\u202f%"
    assert count_words(8_190_735_360) == "8.19\u202fB"


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (0.0, "0 %"),
        (9.75e-06, "< 0.01 %"),
        (0.0002, "0.02 %"),
        (0.004, "0.4 %"),
        (0.62, "62 %"),
        (1.0, "100 %"),
    ],
)
def test_a_small_share_is_not_shown_as_none(ratio: float, words: str) -> None:
    assert percent(ratio).replace("\u202f", " ") == words


def test_a_gap_parts_a_sparkline_instead_of_falling_to_zero() -> None:
    pieces = sparkline_points([1.0, 2.0, None, 2.0, 1.0], width=100, height=28)
    assert len(pieces) == 2
    assert all(float(point.split(",")[1]) < 27 for piece in pieces for point in piece.split())


def test_a_sparkline_of_nothing_is_empty() -> None:
    assert sparkline_points([None, None], width=100, height=28) == ()
    assert sparkline_points([], width=100, height=28) == ()
    assert sparkline_points([0.0, 0.0], width=100, height=28) == ("0.0,27.0 100.0,27.0",)


def test_a_minute_without_a_record_is_a_gap_in_the_chart() -> None:
    known = {NOON: 0.5, NOON + timedelta(minutes=2): 0.7}
    series = by_minute("chat-1", known, since=NOON, until=NOON + timedelta(minutes=2))
    assert list(series.values) == [0.5, None, 0.7]
    figure = small_multiples([Panel("KV", "ratio", (series,), top=1.0)])
    assert figure["data"][0]["connectgaps"] is False
    assert figure["layout"]["yaxis"]["range"] == [0, 1.0]


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_small_multiples_do_not_overlap(columns: int) -> None:
    panels = [Panel(f"p{i}", "ratio", ()) for i in range(4)]
    layout = small_multiples(panels, columns=columns)["layout"]
    names = ["", "2", "3", "4"]
    boxes = [(layout[f"xaxis{n}"]["domain"], layout[f"yaxis{n}"]["domain"]) for n in names]
    for index, (across, down) in enumerate(boxes):
        for other_across, other_down in boxes[index + 1 :]:
            apart = across[1] <= other_across[0] or other_across[1] <= across[0]
            assert apart or down[1] <= other_down[0] or other_down[1] <= down[0]
            gap = max(other_down[0] - down[1], down[0] - other_down[1])
            room = 0.25 / -(-len(panels) // columns)
            assert apart or gap >= room, "a title would stand on the labels of the axis above it"


@pytest.mark.parametrize(
    ("skew_seconds", "begins", "says"),
    [
        (-0.194, "in step with ours (194", "behind ours)"),
        (0.0, "in step with ours (0", "ahead of ours)"),
        (12.0, "12", "ahead of ours: no harm, but times in its logs differ by that"),
        (-300.0, "5", "behind ours: set it right, or times in its logs mislead; nothing else goes by it"),
    ],
)
def test_a_clock_is_told_with_whether_anything_is_to_be_done(
    skew_seconds: float, begins: str, says: str
) -> None:
    told = clock_words(skew_seconds)
    assert told.startswith(begins)
    assert told.endswith(says)


def test_switches_of_an_engine_are_on_or_off_and_numbers_stay_numbers() -> None:
    assert [option_value(value) for value in (True, False, 1, 0, 0.5, "True")] == [
        *("on", "off", "1", "0", "0.5", "True")
    ]
