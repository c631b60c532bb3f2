"""What one replica copies out of another's part of the pool: what its owner vouched for, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from workers.kv.arena import ARENA_FILE, CpuArena, FileScrubber
from workers.kv.neighbour import LentBlock, PoolReader
from workers.kv.transfer import Ticket

BLOCK_BYTES = 4096
EXTENT_BLOCKS = 4
EXTENTS = 4


def ticket(count: int, **changes: bytes) -> Ticket:
    parts = {"transfer_id": b"t" * 16, "key": b"k" * 32, "shape": b"s" * 16} | changes
    return Ticket(**parts, block_bytes=BLOCK_BYTES, block_count=count)


class Owner:
    """A replica with two extents of a pool, full of blocks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ARENA_FILE
        self.extent_bytes = EXTENT_BLOCKS * BLOCK_BYTES
        CpuArena.create(self.path, EXTENTS, self.extent_bytes)
        self.arena = CpuArena(self.path, EXTENTS, self.extent_bytes)
        self.arena.open_extents([1, 2])
        self.digests = [os.urandom(16) for _ in range(2 * EXTENT_BLOCKS)]
        for place in self.places:
            self.write(place, os.urandom(BLOCK_BYTES))

    @property
    def places(self) -> list[int]:
        return list(range(EXTENT_BLOCKS, 3 * EXTENT_BLOCKS))

    def write(self, place: int, content: bytes) -> None:
        self.arena.buffer()[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES] = content

    def content(self, place: int) -> bytes:
        return bytes(self.arena.buffer()[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES])

    def lend(self, told: Ticket) -> list[LentBlock]:
        pairs = enumerate(zip(self.digests, self.places, strict=True))
        return [LentBlock(place, told.tag(n, digest, self.content(place))) for n, (digest, place) in pairs]


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    made = Owner(tmp_path)
    yield made
    made.arena.close()


def copy(
    reader: PoolReader, told: Ticket, digests: Sequence[bytes], lent: Sequence[LentBlock], *, first: int = 0
) -> list[bytes]:
    """Contents of blocks, up to the first that is not as it was lent."""
    copied = []
    for index, (digest, one) in enumerate(zip(digests, lent, strict=True), first):
        into = bytearray(BLOCK_BYTES)
        if not reader.copy(told, index, digest, one, memoryview(into)):
            break
        copied.append(bytes(into))
    return copied


@pytest.fixture
def reader(owner: Owner) -> Iterator[PoolReader]:
    made = PoolReader(owner.path, BLOCK_BYTES)
    yield made
    made.close()


def test_lent_blocks_are_copied_as_they_are(owner: Owner, reader: PoolReader) -> None:
    told = ticket(8)
    contents = [owner.content(place) for place in owner.places]
    assert copy(reader, told, owner.digests, owner.lend(told)) == contents
    assert copy(reader, told, owner.digests[3:5], owner.lend(told)[3:5], first=3) == contents[3:5]


@pytest.mark.parametrize("at", [0, 3, 7])
def test_block_that_was_written_over_or_left_ends_the_copy_before_it(
    owner: Owner, reader: PoolReader, at: int
) -> None:
    told = ticket(8)
    lent = owner.lend(told)
    changed = bytearray(owner.content(owner.places[at]))
    changed[at * 100] ^= 1
    owner.write(owner.places[at], bytes(changed))
    assert len(copy(reader, told, owner.digests, lent)) == at


def test_extent_that_was_given_back_reads_as_nothing(owner: Owner, reader: PoolReader) -> None:
    told = ticket(8)
    lent = owner.lend(told)
    owner.arena.close_extents([2])
    assert len(copy(reader, told, owner.digests, lent)) == EXTENT_BLOCKS
    scrubber = FileScrubber(owner.path, owner.extent_bytes)  # the owner died, and was reclaimed
    scrubber.scrub([1])
    scrubber.close()
    assert copy(reader, told, owner.digests, lent) == []
    assert owner.path.stat().st_blocks == 0, "looking at a hole takes no memory"


def test_place_beyond_the_pool_and_order_of_others_are_refused(owner: Owner, reader: PoolReader) -> None:
    told = ticket(8)
    first, second = owner.lend(told)[:2]
    for place in (-1, EXTENTS * EXTENT_BLOCKS, 1 << 62):
        assert copy(reader, told, owner.digests[:1], [LentBlock(place, first.tag)]) == []
    assert copy(reader, told, owner.digests[:2], [second, first]) == []
    assert copy(reader, told, owner.digests[:1], [first], first=1) == [], "another place of the transfer"
    assert copy(reader, told, [os.urandom(16)], [first]) == [], "another block of a conversation"
    for other in (ticket(8, key=b"x" * 32), ticket(8, transfer_id=b"x" * 16)):
        assert copy(reader, other, owner.digests[:1], [first]) == []


def test_arena_is_named_alike_by_all_that_share_it_and_by_nobody_else(tmp_path: Path, owner: Owner) -> None:
    other = tmp_path / "other"
    CpuArena.create(other, EXTENTS, owner.extent_bytes)
    readers = [PoolReader(path, BLOCK_BYTES) for path in (owner.path, owner.path, other)]
    ids = [reader.arena_id for reader in readers]
    assert ids[0] == ids[1] != ids[2]
    for reader in readers:
        reader.close()
