"""Blocks of one conversation on their way to another replica: how they are framed and checked.

A transfer is a header and then frames, one for each block: the digest that names its content, the
content, and a tag. Header and tags are keyed BLAKE3 under a secret that is made for one transfer and
given to both ends by their agents; so a frame that was damaged, forged, repeated, left out or put
elsewhere is refused, and nobody can put blocks into an engine who was not told to. The bytes are not
secret on the wire: neither are the prompts that they come from.

Whatever arrives is only ever a *prefix*: a transfer that breaks off leaves its first blocks usable,
since each digest covers all blocks before its own.

Pure: bytes in, bytes out. Sockets, files and tensors are the callers'.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

DIGEST_BYTES = 16
KEY_BYTES = 32
_TAG_BYTES = 16
_MAGIC = b"EXKV\x01\x00"
_HEADER = struct.Struct("<6s16s16sII")
HEADER_BYTES = _HEADER.size + _TAG_BYTES
MOST_BLOCKS = 1 << 20
"""Sixteen million tokens."""


class TransferError(Exception):
    """What came is not what the two ends agreed on; nothing of the frame in question is used."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What both ends know of one transfer before it begins."""

    transfer_id: bytes
    """16 random bytes, used once."""
    key: bytes
    """32 secret bytes, for this transfer alone."""
    shape: bytes
    """16 bytes that name weights, element type and block shape: KV fits nowhere else."""
    block_bytes: int
    block_count: int

    def __post_init__(self) -> None:
        sizes = (len(self.transfer_id), len(self.key), len(self.shape))
        if sizes != (16, KEY_BYTES, 16):
            raise ValueError(f"a ticket has an id of 16, a key of 32 and a shape of 16 bytes, not {sizes}")
        if not (0 < self.block_bytes < 1 << 31 and 0 <= self.block_count <= MOST_BLOCKS):
            raise ValueError(f"{self.block_count} blocks of {self.block_bytes} bytes cannot be transferred")

    @property
    def frame_bytes(self) -> int:
        """Bytes of one block on its way."""
        return DIGEST_BYTES + self.block_bytes + _TAG_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole transfer."""
        return HEADER_BYTES + self.block_count * self.frame_bytes

    def header(self) -> bytes:
        """What is sent first."""
        plain = _HEADER.pack(_MAGIC, self.transfer_id, self.shape, self.block_bytes, self.block_count)
        return plain + blake3(plain, key=self.key).digest(_TAG_BYTES)

    def check_header(self, header: bytes | bytearray | memoryview) -> None:
        """Raise `TransferError` unless this is the header of this transfer."""
        if bytes(header) != self.header():
            raise TransferError("the transfer's header is not the one agreed on")

    def tag(self, index: int, digest: bytes, content: bytes | bytearray | memoryview) -> bytes:
        """Tag of the block at a place of the transfer."""
        place = struct.pack("<16sI", self.transfer_id, index)
        keyed = blake3(place, key=self.key)
        keyed.update(digest)
        keyed.update(content)
        return keyed.digest(_TAG_BYTES)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a conversation."""

    digest: bytes
    content: bytes | bytearray | memoryview


def frame(ticket: Ticket, index: int, block: Block) -> tuple[bytes, bytes | bytearray | memoryview, bytes]:
    """Return the three pieces of a frame, which are sent one after the other; the content is not copied.

    Raises `ValueError` for content of another size.
    """
    if len(block.content) != ticket.block_bytes or len(block.digest) != DIGEST_BYTES:
        raise ValueError(f"a block has {ticket.block_bytes} bytes, not {len(block.content)}")
    return block.digest, block.content, ticket.tag(index, block.digest, block.content)


class Intake:
    """The receiving end: takes bytes as they come, gives out checked blocks in order."""

    def __init__(self, ticket: Ticket, expected: Sequence[bytes]) -> None:
        """Expect the blocks with these digests, which the target worked out from the conversation itself.

        Raises `ValueError` unless there are as many as the ticket says.
        """
        if len(expected) != ticket.block_count:
            raise ValueError(f"{len(expected)} digests for {ticket.block_count} blocks")
        self._ticket = ticket
        self._expected = expected
        self._buffer = bytearray()
        self._needs = HEADER_BYTES
        self._began = False
        self.received_blocks = 0

    @property
    def is_complete(self) -> bool:
        """Whether all blocks came."""
        return self._began and self.received_blocks == self._ticket.block_count and not self._buffer

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Block]:
        """Take the next bytes; yield each block that they complete.

        Raises `TransferError`; the intake is of no use then.
        """
        self._buffer += data
        start = 0
        # One view at a time: the buffer cannot shrink while anybody looks at it.
        while len(self._buffer) - start >= self._needs:
            with memoryview(self._buffer) as whole, whole[start : start + self._needs] as piece:
                start += self._needs
                if self._began:
                    yield self._check(piece)
                else:
                    self._begin(piece)
        del self._buffer[:start]
        if self._began and self.received_blocks == self._ticket.block_count and self._buffer:
            raise TransferError("bytes after the last block")

    def _begin(self, piece: memoryview) -> None:
        self._ticket.check_header(piece)
        self._began = True
        self._needs = self._ticket.frame_bytes

    def _check(self, piece: memoryview) -> Block:
        index = self.received_blocks
        if index >= self._ticket.block_count:
            raise TransferError("more blocks than agreed on")
        digest = bytes(piece[:DIGEST_BYTES])
        content = piece[DIGEST_BYTES:-_TAG_BYTES]
        if digest != self._expected[index]:
            raise TransferError(f"block {index} is not the one of this conversation")
        if bytes(piece[-_TAG_BYTES:]) != self._ticket.tag(index, digest, content):
            raise TransferError(f"block {index} was damaged or forged on its way")
        self.received_blocks += 1
        return Block(digest, bytes(content))
