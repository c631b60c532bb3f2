"""Blocks that go to another replica: whole, in order, unforged, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kv.transfer import HEADER_BYTES, Block, Intake, Ticket, TransferError, frame

BLOCK_BYTES = 64


def ticket(count: int, **changes: bytes) -> Ticket:
    parts = {"transfer_id": b"t" * 16, "key": b"k" * 32, "shape": b"s" * 16} | changes
    return Ticket(**parts, block_bytes=BLOCK_BYTES, block_count=count)


def blocks(count: int) -> list[Block]:
    return [Block(os.urandom(16), os.urandom(BLOCK_BYTES)) for _ in range(count)]


def wire(told: Ticket, sent: Iterable[Block]) -> bytes:
    frames = [piece for index, block in enumerate(sent) for piece in frame(told, index, block)]
    return told.header() + b"".join(map(bytes, frames))


def digests(sent: Iterable[Block]) -> list[bytes]:
    return [block.digest for block in sent]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.lists(st.integers(1, 200), min_size=1, max_size=40))
def test_all_blocks_arrive_in_order_however_the_bytes_are_cut(count: int, cuts: list[int]) -> None:
    told, sent = ticket(count), blocks(count)
    data = wire(told, sent)
    assert len(data) == told.total_bytes
    intake = Intake(told, digests(sent))
    got: list[Block] = []
    turn = 0
    while data:
        size = cuts[turn % len(cuts)]
        got += intake.feed(data[:size])
        data, turn = data[size:], turn + 1
    assert intake.is_complete
    assert [(b.digest, bytes(b.content)) for b in got] == [(b.digest, b.content) for b in sent]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.data())
def test_not_one_changed_bit_gets_through(count: int, data: st.DataObject) -> None:
    told, sent = ticket(count), blocks(count)
    raw = bytearray(wire(told, sent))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    intake = Intake(told, digests(sent))
    got: list[Block] = []
    with pytest.raises(TransferError):
        got.extend(intake.feed(raw))  # keeps what came before the damage
    whole = max(0, at - HEADER_BYTES) // told.frame_bytes
    assert [bytes(b.content) for b in got] == [b.content for b in sent[:whole]]


def test_broken_off_transfer_is_not_complete_and_its_first_blocks_are_good() -> None:
    told, sent = ticket(3), blocks(3)
    intake = Intake(told, digests(sent))
    got = list(intake.feed(wire(told, sent)[: HEADER_BYTES + told.frame_bytes + 5]))
    assert [b.digest for b in got] == digests(sent)[:1]
    assert not intake.is_complete


@pytest.mark.parametrize(
    "other",
    [
        ticket(2, key=b"x" * 32),
        ticket(2, transfer_id=b"u" * 16),
        ticket(2, shape=b"q" * 16),
        ticket(3),
    ],
)
def test_transfer_of_another_ticket_is_refused_before_its_first_block(other: Ticket) -> None:
    sent = blocks(other.block_count)
    told = ticket(2)
    intake = Intake(told, digests(sent)[:2])
    with pytest.raises(TransferError, match="header"):
        list(intake.feed(wire(other, sent)))


def test_blocks_that_were_swapped_repeated_or_left_out_are_refused() -> None:
    told, sent = ticket(3), blocks(3)
    for order in ((1, 0, 2), (0, 0, 2), (0, 2, 2)):
        data = told.header() + b"".join(
            bytes(piece) for place in order for piece in frame(told, place, sent[place])
        )
        with pytest.raises(TransferError):
            list(Intake(told, digests(sent)).feed(data))


def test_content_of_another_conversation_is_refused_even_from_who_knows_the_key() -> None:
    told, sent = ticket(1), blocks(1)
    with pytest.raises(TransferError, match="conversation"):
        list(Intake(told, [os.urandom(16)]).feed(wire(told, sent)))


def test_more_than_agreed_on_is_refused() -> None:
    told, sent = ticket(1), blocks(1)
    with pytest.raises(TransferError, match="after the last"):
        list(Intake(told, digests(sent)).feed(wire(told, sent) + b"x"))


def test_impossible_tickets_are_refused() -> None:
    with pytest.raises(ValueError, match="id of 16"):
        ticket(1, key=b"short")
    with pytest.raises(ValueError, match="cannot be transferred"):
        ticket(1 << 21)
    with pytest.raises(ValueError, match="digests"):
        Intake(ticket(2), [])
    with pytest.raises(ValueError, match="bytes"):
        frame(ticket(1), 0, Block(b"d" * 16, b"short"))
