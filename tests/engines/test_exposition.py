"""Metrics pages as they really come: odd, damaged, cut off, or no metrics at all."""

from __future__ import annotations

import math

import pytest

from workers.engines.exposition import parse_exposition
from workers.engines.own_launch import parse_own_metrics


def test_label_with_a_space_and_a_timestamp_do_not_move_the_value() -> None:
    page = parse_exposition('drafts_total{model_name="my model"} 5000 1790347303000\n')
    (series,) = page.series["drafts_total"]
    assert series.value == 5000
    assert series.labels == {"model_name": "my model"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [('"{x},y"', "{x},y"), (r'"F:\\"', "F:\\"), (r'"say \"hi\""', 'say "hi"'), (r'"l1\nl2"', "l1\nl2")],
)
def test_escapes_and_braces_in_labels_are_decoded(written: str, meant: str) -> None:
    page = parse_exposition(f"m{{a={written}}} 1\n")
    assert page.series["m"][0].labels == {"a": meant}
    assert page.dropped_lines == 0


@pytest.mark.parametrize(
    "bad",
    ['bad{model="x"evil"} 2', "bad{ 2", "bad", "bad two", "1bad 2", 'bad{a="x"} ', "=== 3", "bad 1_0"],
)
def test_a_damaged_line_is_dropped_alone_and_counted(bad: str) -> None:
    page = parse_exposition(f"good_before 1\n{bad}\ngood_after 3\n")
    assert page.find_value("good_before") == 1
    assert page.find_value("good_after") == 3
    assert page.find_value("bad") is None
    assert page.dropped_lines == 1
    assert page.notes == ("1 lines dropped",)


@pytest.mark.parametrize("text", ["NaN", "-nan", "nan", "+Inf", "-Inf", "1e400", "9" * 400])
def test_value_that_is_no_finite_number_is_no_value(text: str) -> None:
    page = parse_exposition(f"busy {text}\nother 1\n")
    assert page.series["busy"][0].value is None
    assert page.find_value("busy") is None
    assert page.find_value("other") == 1


def test_of_duplicate_series_the_last_counts_and_they_are_noted() -> None:
    page = parse_exposition('m{a="1",b="2"} 1.67\nm{b="2",a="1"} 48.6\nm{a="2",b="2"} 1\n')
    assert page.find_value("m", {"a": "1"}) == 48.6
    assert page.find_value("m") == pytest.approx(49.6)
    assert page.notes == ("1 duplicate series",)


def test_type_comes_from_its_declaration_and_not_from_a_suffix() -> None:
    page = parse_exposition(
        "# TYPE iteration_tokens_total histogram\n"
        'iteration_tokens_total_bucket{le="1.0"} 2\n'
        'iteration_tokens_total_bucket{le="8.0"} 5\n'
        'iteration_tokens_total_bucket{le="+Inf"} 6\n'
        "iteration_tokens_total_sum 31\n"
        "iteration_tokens_total_count 6\n"
        "iteration_tokens_total_created 1.75e9\n"
        "# TYPE prompt_tokens_total counter\n"
        "prompt_tokens_total 9\n"
        "# TYPE prompt_tokens_created gauge\n"
        "prompt_tokens_created 1.75e9\n"
    )
    histogram = page.find_histogram("iteration_tokens_total")
    assert histogram is not None
    assert histogram.bounds == (1.0, 8.0, math.inf)
    assert list(histogram.counts) == [2, 5, 6]
    assert histogram.total == 31
    assert page.find_histogram("prompt_tokens_total") is None
    assert page.find_value("prompt_tokens_total") == 9
    assert not [name for name in page.series if name.endswith("_created")]


def test_last_line_without_an_end_may_be_cut_and_is_left_out() -> None:
    page = parse_exposition("whole 1\ncut 12")
    assert page.find_value("whole") == 1
    assert page.find_value("cut") is None
    assert page.notes == ("page cut off",)


def test_windows_line_ends_are_read() -> None:
    page = parse_exposition("# TYPE m gauge\r\nm 4\r\n")
    assert page.find_value("m") == 4
    assert page.types == {"m": "gauge"}


@pytest.mark.parametrize(
    "buckets",
    [
        'h_bucket{le="1"} 2\n',
        'h_bucket{le="1"} 5\nh_bucket{le="+Inf"} 2\n',
        'h_bucket{le="x"} 5\nh_bucket{le="+Inf"} 6\n',
        'h_bucket{le="1"} NaN\nh_bucket{le="+Inf"} 6\n',
        "",
    ],
)
def test_histogram_that_contradicts_itself_is_none(buckets: str) -> None:
    assert parse_exposition(f"# TYPE h histogram\n{buckets}").find_histogram("h") is None


def test_what_a_page_lacks_is_unknown_and_not_zero() -> None:
    sample = parse_own_metrics("exaserve_engine_requests_running 2.0\nexaserve_engine_requests_waiting 0.0\n")
    assert sample.requests_running == 2
    assert sample.requests_waiting == 0
    assert sample.generation_tokens is None
    assert sample.requests_finished is None
    assert sample.ttft is None
    assert sample.kv_used_ratio is None
    assert sample.kv_total_blocks is None


def test_web_page_of_a_proxy_is_no_metrics_page() -> None:
    sample = parse_own_metrics("<!doctype html>\n<html><body>502 Bad Gateway</body></html>\n")
    assert sample.notes == ("no metrics of this engine on the page",)
    assert sample.requests_running is None
    assert sample.prompt_tokens is None
