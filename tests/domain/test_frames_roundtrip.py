"""Frames: what goes in comes out, and nothing that is missing looks like a zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.telemetry.domain import frames
from exaserve_ops.telemetry.domain.frame_encoding import Cell, encode_frame
from exaserve_ops.telemetry.domain.frames import METRICS, decode_frame, quantise

values = st.one_of(st.none(), st.floats())
cells = st.one_of(
    st.none(),
    st.builds(
        Cell,
        status=st.integers(0, 254),
        values=st.tuples(*[values] * len(METRICS)),
        stale=st.booleans(),
    ),
)


def encode(content: Sequence[Cell | None]) -> bytes:
    return encode_frame(content, layout_version=7, sequence=8, built_at_seconds=9.5)


@given(st.lists(cells, max_size=9))
def test_frame_comes_back_as_it_was(content: list[Cell | None]) -> None:
    decoded = decode_frame(encode(content))
    assert (decoded.layout_version, decoded.sequence, decoded.built_at_seconds) == (7, 8, 9.5)
    assert list(decoded.statuses) == [frames.EMPTY_SLOT if c is None else c.status for c in content]
    assert len(decoded.codes) == len(METRICS)
    for index, cell in enumerate(content):
        for number, metric in enumerate(METRICS):
            seen = decoded.value(number, index)
            sent = None if cell is None or cell.stale else cell.values[number]
            if sent is None or math.isnan(sent):
                assert seen is None or math.isnan(seen)
                assert (seen is None) == (sent is None)
            else:
                highest = frames.HIGHEST * metric.scale
                assert seen == pytest.approx(min(highest, max(0.0, sent)), abs=metric.scale / 2 + 1e-9)


@given(st.lists(cells, max_size=9))
def test_all_codes_at_once_are_those_of_each_value_alone(content: list[Cell | None]) -> None:
    codes = decode_frame(encode(content)).codes
    for number, metric in enumerate(METRICS):
        assert codes[number] == tuple(
            frames.MISSING if c is None else quantise(c.values[number], metric.scale, stale=c.stale)
            for c in content
        )


def test_missing_stale_nan_and_zero_have_codes_of_their_own() -> None:
    codes = [
        quantise(None, 1.0),
        quantise(1.0, 1.0, stale=True),
        quantise(math.nan, 1.0),
        quantise(0.0, 1.0),
    ]
    assert codes == [frames.MISSING, frames.STALE, frames.NOT_A_NUMBER, 0]


@pytest.mark.parametrize(
    ("value", "code"), [(math.inf, frames.HIGHEST), (-math.inf, 0), (1e308, frames.HIGHEST), (-5.0, 0)]
)
def test_values_beyond_the_range_end_at_its_edges(value: float, code: int) -> None:
    assert quantise(value, 0.0001) == code


def test_frame_over_the_bound_is_refused_and_the_largest_fleet_fits() -> None:
    cell = Cell(0, (0.5,) * len(METRICS))
    assert len(encode([cell] * 512 * 8)) <= frames.MAX_FRAME_BYTES
    with pytest.raises(ValueError, match="is over"):
        encode([cell] * 30_000)


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_or_read_but_never_crash(data: bytes) -> None:
    try:
        decode_frame(data)
    except ValueError:
        return
    assert data[:2] == b"XF"
