"""A step's chunks for kernels that take sequences of all lengths at once, without groups or padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from workers.engines.torch_engine.scheduler import Chunk
from workers.protocol.digests import KV_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class RaggedChunks:
    """All rows of a batch. A sequence's keys are those that its chunk's first row may see, and later ones."""

    table: Tensor
    """`[blocks]` block numbers, sequence after sequence: what is gathered."""
    paged_table: Tensor
    """`[sequences, most blocks]` of int32; padding repeats a sequence's own last block."""
    query_starts: Tensor
    """`[sequences + 1]` of int32: rows at which sequences begin, and the end."""
    key_starts: Tensor
    """`[sequences + 1]` of int32: among gathered tokens, whole blocks for each sequence."""
    key_counts: Tensor
    """`[sequences]` of int32: tokens of those that are real."""
    first_positions: Tensor
    """`[sequences]`: position in its sequence of each one's first gathered token."""
    rows: int
    """Of the batch."""
    most_queries: int
    most_keys: int
    """Of any sequence, in whole blocks."""
    window: int | None
    """How many tokens back, itself included, a token sees; `None`: all of them."""

    @property
    def sequences(self) -> int:
        """Chunks of the batch."""
        return len(self.key_counts)


def plan_ragged(chunks: Sequence[Chunk], window: int | None, device: torch.device) -> RaggedChunks:
    """Lay out chunks, in the order of the batch's rows, for layers of one window."""
    firsts = [first_block(chunk, window) for chunk in chunks]
    blocks = [
        chunk.sequence.blocks[first : -(-chunk.end // KV_BLOCK_TOKENS)]
        for chunk, first in zip(chunks, firsts, strict=True)
    ]
    widest = max(map(len, blocks))
    counts = [chunk.count for chunk in chunks]

    def integers(values: Sequence[object], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    return RaggedChunks(
        table=integers([block for part in blocks for block in part], torch.long),
        # Others' blocks may be out of bounds for this process, so padding names one's own.
        paged_table=integers([[*part, *part[-1:] * (widest - len(part))] for part in blocks]),
        query_starts=integers([0, *accumulate(counts)]),
        key_starts=integers([0, *accumulate(len(part) * KV_BLOCK_TOKENS for part in blocks)]),
        key_counts=integers(
            [chunk.end - first * KV_BLOCK_TOKENS for chunk, first in zip(chunks, firsts, strict=True)]
        ),
        first_positions=integers([first * KV_BLOCK_TOKENS for first in firsts], torch.long),
        rows=sum(counts),
        most_queries=max(counts),
        most_keys=widest * KV_BLOCK_TOKENS,
        window=window,
    )


def first_block(chunk: Chunk, window: int | None) -> int:
    """First block that any query of the chunk sees."""
    if window is None:
        return 0
    return max(chunk.start + 1 - window, 0) // KV_BLOCK_TOKENS
