"""Answers are cut right, however the network cuts them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.gateway.answers import StreamAnswer
from exaserve_ops.gateway.framing import ChunkedFrame, FramingError, LengthFrame
from exaserve_ops.gateway.upstream import authority

PAYLOADS = st.lists(st.binary(min_size=1, max_size=40), max_size=8)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(PAYLOADS, st.lists(st.integers(0, 1000), max_size=12), st.booleans())
def test_chunks_pass_unchanged_wherever_they_are_cut(
    payloads: list[bytes], places: list[int], whole_chunks: bool
) -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads)
    frame = ChunkedFrame(whole_chunks=whole_chunks)
    passed, seen = b"", b""
    for piece in cut(body + b"0\r\nx-trailer: 1\r\n\r\n", places):
        assert not frame.complete
        passed += frame.feed(piece)
        seen += frame.payload
    assert frame.complete
    assert passed == body
    assert seen == b"".join(payloads)


@given(PAYLOADS, st.integers(0, 400))
def test_stream_can_be_ended_between_chunks_at_any_moment(payloads: list[bytes], at: int) -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads)
    frame = ChunkedFrame(whole_chunks=True)
    passed = frame.feed(body[:at])
    ending = frame.append(b"END")
    assert ending is not None
    reader = ChunkedFrame(whole_chunks=True)  # what a client makes of it
    reader.feed(passed + ending)
    assert reader.complete
    assert reader.payload.endswith(b"END")
    assert b"".join(payloads).startswith(reader.payload[:-3])


@pytest.mark.parametrize(
    "data",
    [b"zz\r\n", b"2\r\nabc\r\n", b"-1\r\n", b"0\r\n\r\nmore", b"x" * 300, b"fffffffff\r\n", b"2 ;\n\r\n"],
)
@pytest.mark.parametrize("whole_chunks", [True, False])
def test_wrong_chunks_are_errors(data: bytes, *, whole_chunks: bool) -> None:
    with pytest.raises(FramingError):
        ChunkedFrame(whole_chunks=whole_chunks).feed(data)


def test_more_bytes_than_announced_are_an_error() -> None:
    with pytest.raises(FramingError):
        LengthFrame(2).feed(b"abc")


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", True),
        (b"data: {}\r\n\r\ndata:[DONE]\r\n\r\n", True),
        (b"data: {}\n\n", False),
        (b'data: {"text": "data: [DONE]"}\n\n', False),
        (b'data: {"error": {"message": "x"}}\n\n', True),
        (b'data: {"error": null}\n\n', False),
        (b"", False),
    ],
)
def test_proper_end_of_a_stream_is_told_from_a_cut(text: bytes, *, finished: bool) -> None:
    answer = StreamAnswer()
    for byte in text:
        assert answer.relay(b"", bytes([byte])) == b""
    assert answer.is_finished() is finished


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("2001:db8::1", b"[2001:db8::1]:8000"),
        ("[2001:db8::1]", b"[2001:db8::1]:8000"),
        ("fe80::1%eth0", b"[fe80::1]:8000"),
        ("host", b"host:8000"),
        ("10.0.0.1", b"10.0.0.1:8000"),
    ],
)
def test_authority_brackets_ipv6(host: str, expected: bytes) -> None:
    assert authority(host, 8000) == expected
