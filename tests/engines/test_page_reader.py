"""The quick reader of pages says what prometheus_client's parser says, line by line."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from workers.engines import exposition
from workers.engines.exposition import BEYOND, PageReader, parse_exposition

names = st.from_regex(r"[a-z_:][a-z0-9_:]{0,6}", fullmatch=True)
label_names = st.from_regex(r"[a-z_][a-z0-9_]{0,4}", fullmatch=True)
label_values = st.text(st.sampled_from('ab\\"n{},= #é\t'), max_size=6)
spaces = st.sampled_from(["", " ", "  ", "\t"])
numbers = st.one_of(
    st.floats().map(repr),
    st.integers().map(str),
    st.sampled_from(["NaN", "-nan", "+Inf", "-Inf", "1e400", "1_0", "0x1f", "1,5", "--1", "", "9" * 400]),
)


@st.composite
def labels(draw: st.DrawFn) -> str:
    """Labels, mostly escaped as they should be, sometimes left as they are."""
    pairs = []
    for name, value in draw(st.lists(st.tuples(label_names, label_values), max_size=3)):
        right = value.replace("\\", "\\\\").replace('"', '\\"')
        pairs.append(f'{name}="{right if draw(st.integers(0, 9)) else value}"')
    return "{" + ("," + draw(spaces)).join(pairs) + draw(st.sampled_from(["", ","])) + "}"


@st.composite
def sample_lines(draw: st.DrawFn) -> str:
    head = draw(spaces) + draw(names) + draw(spaces) + draw(st.one_of(st.just(""), labels()))
    time = draw(st.sampled_from(["", " 1790347303000", "\t17", " -1", " x", " 1.5"]))
    return head + draw(st.sampled_from([" ", "  ", "\t", ""])) + draw(numbers) + time + draw(spaces)


def library_rows(line: str) -> list[tuple[str, dict[str, str], float | None]] | None:
    """What the library makes of a line; `None` if it refuses it."""
    try:
        samples = [s for family in text_string_to_metric_families(line) for s in family.samples]
        found = [(s.name, dict(s.labels), to_float(s.value)) for s in samples]
    except (ValueError, IndexError, OverflowError):
        return None
    return [(name, told, value if abs(value) < BEYOND else None) for name, told, value in found]


def to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def rows_of(page: exposition.Exposition) -> list[tuple[str, dict[str, str], float | None]]:
    return [(name, dict(row.labels), row.value) for name, rows in page.series.items() for row in rows]


@given(sample_lines())
@example('m{a="x"} 5 # {trace_id="1"} 0.5')
@example('m{a="x",a="y"} 5')
@example('m{a="x"}5')
@example('m{a="\\x"} 5')
@example('{"quoted name",a="x"} 5')
def test_a_line_means_what_the_library_says_it_means(line: str) -> None:
    expected = library_rows(line)
    reader = PageReader()
    for _ in range(2):  # the second time from what was remembered
        page = reader.read(line + "\n")
        assert rows_of(page) == (expected or [])
        assert page.dropped_lines == (expected is None)


@given(st.lists(sample_lines(), max_size=12))
def test_lines_do_not_change_what_other_lines_mean(lines: list[str]) -> None:
    alone = [parse_exposition(line + "\n") for line in lines]
    together = PageReader()
    for _ in range(2):
        page = together.read("\n".join([*lines, ""]))
        assert page.dropped_lines == sum(one.dropped_lines for one in alone)
        told = {(name, frozenset(found.items())) for one in alone for name, found, _ in rows_of(one)}
        assert {(name, frozenset(found.items())) for name, found, _ in rows_of(page)} == told
        assert page.duplicate_series == sum(len(rows_of(one)) for one in alone) - len(told)


@given(st.text(st.sampled_from('ab{}="\\, 1\n#é\t:_'), max_size=80))
def test_whatever_comes_is_read_or_counted_and_never_an_error(text: str) -> None:
    reader = PageReader()
    first, second = reader.read(text), reader.read(text)
    assert rows_of(first) == rows_of(second)
    assert first.dropped_lines == second.dropped_lines


def test_only_what_is_asked_for_is_read_and_damage_elsewhere_is_nobodys_concern() -> None:
    page = 'a 1\nb{x="1"} 2\nb{x="2"evil"} 3\nc{y="2"evil"} 4\nab 5\n'
    named = PageReader(names=("a", "b")).read(page)
    assert sorted(named.series) == ["a", "b"]
    assert named.dropped_lines == 1
    assert sorted(PageReader(prefixes=("a",)).read(page).series) == ["a", "ab"]


def test_exemplars_and_the_end_mark_of_openmetrics_are_read_over() -> None:
    page = parse_exposition(
        "# TYPE h histogram\n# UNIT h seconds\n"
        'h_bucket{le="0.5"} 3 # {trace_id="a b"} 0.4 1790347303.0\n'
        'h_bucket{le="+Inf"} 4 1790347303.0 # {} 0.9\n'
        "h_sum 1.5\nh_count 4\nh_created 1.79e9\n# EOF\n"
    )
    histogram = page.find_histogram("h")
    assert histogram is not None
    assert list(histogram.counts) == [3, 4]
    assert page.notes == ()
    assert "h_created" not in page.series


@pytest.mark.parametrize("declared", ["gauge", "counter", "summary"])
def test_a_family_declared_as_something_else_is_no_histogram(declared: str) -> None:
    buckets = 'h_bucket{le="1"} 2\nh_bucket{le="+Inf"} 2\n'
    assert parse_exposition(f"# TYPE h {declared}\n{buckets}").find_histogram("h") is None
    assert parse_exposition(buckets).find_histogram("h") is not None


def test_what_is_remembered_is_bounded_also_for_labels_that_never_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exposition, "MOST_KNOWN_HEADS", 20)
    reader = PageReader()
    for number in range(300):
        page = reader.read(f'm{{a="{number}"}} {number}\nn{{a="{number}"}} 1 1790347303\n')
        assert page.find_value("m") == number
        assert max(len(reader._known), len(reader._heads)) <= 20 + 4
