"""A step as one stage tells it to the next: fixed layouts of numbers, never objects.

What computes a step's chunks needs where their keys and values lie, in the order that the first stage has
given the rows. Tokens are not told: they are known to the first stage, and chosen by the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.engines.torch_engine.sampling import Choice
from workers.engines.torch_engine.scheduler import Chunk, Sequence
from workers.protocol.digests import KV_BLOCK_TOKENS

HEADER_NUMBERS = 4
"""int64: number of the step, bytes of the message, rows, choices."""
_COUNTS = 4
_CHUNK_NUMBERS = 4
_NUMBER = np.dtype("<i4")
_REAL = np.dtype("<f8")
_ALIGNED_BYTES = 64
MOST_MESSAGE_BYTES = 1 << 28
"""Block numbers of 256 requests of four million tokens."""


class StageWireError(ValueError):
    """What another stage said makes no sense; the message says what."""


@dataclass(frozen=True, slots=True)
class StepOrder:
    """One step, as the first stage has laid it out."""

    groups: tuple[tuple[Chunk, ...], ...]
    choices: tuple[Choice, ...]
    """How the token of each sampled chunk is chosen, in the order of the rows."""


def encode_order(groups: Sequences[Sequences[Chunk]], choices: Sequences[Choice]) -> bytes:
    """Lay an order out as bytes, padded so that what follows is aligned for every type."""
    chunks = [chunk for group in groups for chunk in group]
    blocks = [_blocks_of(chunk) for chunk in chunks]
    told = [(c.start, c.count, int(c.samples), len(b)) for c, b in zip(chunks, blocks, strict=True)]
    numbers = [len(groups), len(chunks), sum(map(len, blocks)), len(choices), *map(len, groups)]
    numbers += chain.from_iterable(told)
    numbers += chain.from_iterable(blocks)
    whole = np.asarray(numbers, _NUMBER).tobytes()
    whole += b"\0" * (-len(whole) % _REAL.itemsize) + np.asarray(choices, _REAL).tobytes()
    return whole + b"\0" * (-len(whole) % _ALIGNED_BYTES)


def decode_order(message: NDArray[np.uint8], *, total_blocks: int) -> StepOrder:
    """Read an order. Raises `StageWireError`, before anything of it is used."""
    reader = _Reader(message)
    group_count, chunk_count, block_count, choice_count = reader.numbers(_COUNTS)
    sizes = reader.numbers(group_count)
    told = reader.rows((chunk_count, _CHUNK_NUMBERS))
    blocks = reader.numbers(block_count)
    if any(not 0 <= block < total_blocks for block in blocks):
        raise StageWireError(f"a block beyond the {total_blocks} that there are")
    chunks = _chunks(told, blocks)
    if sum(sizes) != chunk_count or min(sizes, default=1) < 1:
        raise StageWireError(f"groups of {sizes} chunks, and there are {chunk_count}")
    if sum(chunk.samples for chunk in chunks) != choice_count:
        raise StageWireError(f"{choice_count} choices are not one for each sampled chunk")
    choices = tuple(Choice(*three) for three in reader.reals((choice_count, len(Choice._fields))))
    places = iter(chunks)
    return StepOrder(tuple(tuple(next(places) for _ in range(size)) for size in sizes), choices)


def _blocks_of(chunk: Chunk) -> list[int]:
    return chunk.sequence.blocks[: -(-chunk.end // KV_BLOCK_TOKENS)]


def _chunks(told: Sequences[Sequences[int]], blocks: Sequences[int]) -> list[Chunk]:
    chunks: list[Chunk] = []
    at = 0
    for start, count, samples, held in told:
        end = start + count
        if start < 0 or count < 1 or held != -(-end // KV_BLOCK_TOKENS) or at + held > len(blocks):
            raise StageWireError(f"a chunk from {start}, {count} tokens, in {held} blocks")
        # Of tokens only their number counts here: one that is not computed yet is one more.
        tokens = [0] * (end if samples else end + 1)
        chunks.append(Chunk(Sequence("", tokens, blocks=list(blocks[at : at + held])), start, count))
        at += held
    if at != len(blocks):
        raise StageWireError(f"{len(blocks)} blocks, and the chunks have {at}")
    return chunks


class _Reader:
    """Takes numbers off a message, one after the other."""

    def __init__(self, message: NDArray[np.uint8]) -> None:
        self._message = message
        self._at = 0

    def numbers(self, count: int) -> list[int]:
        found: list[int] = self._take((count,), _NUMBER).tolist()
        return found

    def rows(self, shape: tuple[int, int]) -> list[list[int]]:
        found: list[list[int]] = self._take(shape, _NUMBER).tolist()
        return found

    def reals(self, shape: tuple[int, int]) -> list[list[float]]:
        self._at += -self._at % _REAL.itemsize
        found: list[list[float]] = self._take(shape, _REAL).tolist()
        return found

    def _take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        size = math.prod(shape) * dtype.itemsize
        if min(shape) < 0 or self._at + size > len(self._message):
            raise StageWireError(f"{shape} numbers at {self._at} of {len(self._message)} bytes")
        taken = self._message[self._at : self._at + size].view(dtype).reshape(shape)
        self._at += size
        return taken
