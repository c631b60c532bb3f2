"""Events and stop strings, however they were cut on their way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.gateway.event_stream import EventSplitter, data_of
from exaserve_ops.gateway.framing import FramingError
from exaserve_ops.gateway.stop_cut import StopCut

BLOCKS = [b'data: {"a": 1}', b"data: [DONE]", b": ping", b"event: x\ndata: 1\ndata: 2", b"data:"]


@given(
    blocks=st.lists(st.sampled_from(BLOCKS), max_size=6),
    ends=st.lists(st.sampled_from([b"\n\n", b"\r\n\r\n"]), min_size=6, max_size=6),
    cuts=st.lists(st.integers(0, 120), max_size=8),
)
def test_events_are_the_same_wherever_reads_end(
    blocks: list[bytes], ends: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(block + end for block, end in zip(blocks, ends, strict=False))
    splitter = EventSplitter(1000)
    seen: list[bytes] = []
    position = 0
    for cut in [*sorted(cuts), len(stream)]:
        seen += splitter.feed(stream[position : max(position, cut)])
        position = max(position, cut)
    assert [data_of(event) for event in seen] == [data_of(block) for block in blocks]


def test_event_that_does_not_end_is_not_collected_for_ever() -> None:
    splitter = EventSplitter(100)
    assert splitter.feed(b"data: " + b"x" * 90) == []
    with pytest.raises(FramingError, match="too large"):
        splitter.feed(b"x" * 10)


def test_data_is_what_follows_the_fields_name() -> None:
    assert data_of(b"data:  x ") == b"x"
    assert data_of(b"event: a\r\ndata: 1\r\ndata: 2") == b"1\n2"
    assert data_of(b": comment") is None


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_is_cut_where_the_first_stop_string_begins(pieces: list[str], stops: list[str]) -> None:
    cut = StopCut(stops)
    shown, whole = "", ""
    for piece in pieces:
        whole += piece
        fresh, met = cut.feed(piece)
        shown += fresh
        found = [whole.index(stop) for stop in stops if stop in whole]
        assert met == bool(found)
        if met:
            assert shown == whole[: min(found)]
            return
        assert whole.startswith(shown)
        held = whole[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops), "no more is held back than must be"
    assert shown + cut.flush() == whole
