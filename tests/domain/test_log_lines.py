"""Lines of a log that come again are told once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.telemetry.domain.log_lines import untold

Lines = st.lists(st.sampled_from("abc"), max_size=12)


@given(log=st.lists(st.integers(0, 10_000), unique=True, max_size=60), data=st.data())
def test_whoever_is_asked_anew_adds_what_was_written_meanwhile_and_nothing_else(
    log: list[int], data: st.DataObject
) -> None:
    lines = [f"line {number}" for number in log]
    known = data.draw(st.integers(0, len(lines)), label="lines that were told")
    backlog = data.draw(st.integers(0, len(lines)), label="lines of the backlog")
    newest = lines[len(lines) - backlog :]
    told = lines[:known] + list(untold(lines[:known], newest))
    missed = max(0, len(lines) - backlog - known)
    assert told == lines[:known] + lines[known + missed :]


@given(kept=Lines, newest=Lines)
def test_whatever_repeats_itself_what_is_told_ends_as_the_log_does(
    kept: list[str], newest: list[str]
) -> None:
    told = untold(kept, newest)
    assert list(told) == newest[len(newest) - len(told) :]
    assert [*kept, *told][-len(newest) :] == newest or not newest


def test_long_lines_whose_ends_were_cut_differently_are_the_same() -> None:
    assert untold(["a" * 4096], ["a" * 4095 + "…", "b"]) == ("b",)
