"""A step's chunks as tensors: rows, slots, and who attends to what.

Whatever attention needs is worked out once a step, not once a layer. No loop over single sequences is
left for the layers: short chunks are packed into groups of about the same shape, padded to the group's
longest, and only long chunks, each of which fills a kernel by itself, stand alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engines.torch_engine.ragged import RaggedChunks, first_block, plan_ragged
from workers.engines.torch_engine.scheduler import Chunk
from workers.protocol.digests import KV_BLOCK_TOKENS

_LONGEST_PACKED_TOKENS = {"cpu": 32, "cuda": 256}
"""Chunks up to this length are padded to one another; longer ones would waste more than a call costs."""
_MERGED_PADDING_BLOCKS = 64
"""Padding that is cheaper to read than another group is to launch."""


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """Rows `start:end` of a batch: chunks of several sequences, padded to the same shape."""

    start: int
    end: int
    sequences: int
    table: Tensor
    """`[sequences * blocks]` block numbers; padding repeats a sequence's own last block."""
    mask: Tensor
    """Added to the scores: `[sequences, 1, 1 or shared * queries, blocks * block_tokens]`."""
    padded_rows: Tensor | None
    """`[sequences * queries]` rows of this group, a chunk's last one repeated; `None`: one row each."""
    real_places: Tensor | None
    """Where among the padded rows the real ones are, in order."""


@dataclass(frozen=True, slots=True)
class SingleChunk:
    """Rows `start:end` of a batch: one chunk, by itself."""

    start: int
    end: int
    table: Tensor | None
    """`[blocks]` block numbers; `None` if the chunk sees itself only, from its sequence's first token."""
    first_token: int
    """Of the gathered blocks, tokens from here on are seen,"""
    end_token: int
    """up to here."""
    mask: Tensor | None
    """`[end - start, end_token - first_token]`, added to the scores. `None` with a table: all is seen."""


Attention = PackedChunks | SingleChunk | RaggedChunks


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All rows of a step, one row for each new token."""

    tokens: Tensor
    positions: Tensor
    slots: tuple[Tensor, Tensor]
    """Where each row's key and value go: block numbers, and places inside those blocks."""
    attention: Mapping[int | None, tuple[Attention, ...]]
    """For each sliding window in tokens (`None`: no window), parts that cover all rows in order."""
    sampled_rows: Tensor
    """Rows whose logits are wanted, in the order of `sampled_chunks`."""
    sampled_chunks: tuple[Chunk, ...]
    groups: tuple[tuple[Chunk, ...], ...]
    """All chunks in the order of the rows, those together that are attended from together."""


class BatchBuilder:
    """Lays the chunks of a step out for one model on one device."""

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        shared_heads: int,
        windows: Iterable[int | None] = (None,),
        ragged: bool = False,
        group_blocks: int | None = None,
    ) -> None:
        """`shared_heads` query heads read one key-value head; `windows` are those of the layers.

        `ragged` lays all chunks out as one part, for kernels that take sequences of any lengths.
        Otherwise a group of several chunks reads at most `group_blocks`, padding included.
        """
        self._device = device
        self._dtype = dtype
        self._shared_heads = shared_heads
        self._windows = tuple(dict.fromkeys(windows))
        self._ragged = ragged
        self._group_blocks = group_blocks
        self._longest_packed = _LONGEST_PACKED_TOKENS.get(device.type, 32)

    def build(self, chunks: Sequence[Chunk]) -> StepBatch:
        """Lay the chunks out as rows, group by group."""
        return self.build_groups(
            group_chunks(chunks, longest_packed=self._longest_packed, most_blocks=self._group_blocks)
        )

    def build_groups(self, groups: Sequence[Sequence[Chunk]]) -> StepBatch:
        """Lay out chunks that are in groups already."""
        ordered = [chunk for group in groups for chunk in group]
        tokens: list[int] = []
        positions: list[int] = []
        slot_blocks: list[int] = []
        sampled_rows: list[int] = []
        for chunk in ordered:
            blocks = chunk.sequence.blocks
            tokens += chunk.sequence.tokens[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            slot_blocks += [blocks[at // KV_BLOCK_TOKENS] for at in range(chunk.start, chunk.end)]
            if chunk.samples:
                sampled_rows.append(len(tokens) - 1)
        return StepBatch(
            tokens=self._integers(tokens),
            positions=self._integers(positions),
            slots=(self._integers(slot_blocks), self._integers([at % KV_BLOCK_TOKENS for at in positions])),
            attention={window: self._attention(groups, window) for window in self._windows},
            sampled_rows=self._integers(sampled_rows),
            sampled_chunks=tuple(chunk for chunk in ordered if chunk.samples),
            groups=tuple(map(tuple, groups)),
        )

    def _attention(self, groups: Sequence[Sequence[Chunk]], window: int | None) -> tuple[Attention, ...]:
        if self._ragged:
            return (plan_ragged([chunk for group in groups for chunk in group], window, self._device),)
        parts: list[PackedChunks | SingleChunk] = []
        start = 0
        for group in groups:
            part = self._single(group[0], start, window) if len(group) == 1 else None
            parts.append(part or self._packed(group, start, window))
            start = parts[-1].end
        return tuple(parts)

    def _single(self, chunk: Chunk, start: int, window: int | None) -> SingleChunk:
        end = start + chunk.count
        if chunk.start == 0 and (window is None or chunk.count <= window):
            return SingleChunk(start, end, None, 0, chunk.count, None)
        first = first_block(chunk, window)
        shift = first * KV_BLOCK_TOKENS
        first_token = 0 if window is None else max(chunk.start + 1 - window - shift, 0)
        end_token = chunk.end - shift
        mask = None
        if chunk.count > 1:
            keys = torch.arange(first_token + shift, chunk.end, device=self._device)
            queries = torch.arange(chunk.start, chunk.end, device=self._device)
            mask = self._mask(keys, queries, window)
        table = self._integers(chunk.sequence.blocks[first : _block_count(chunk)])
        return SingleChunk(start, end, table, first_token, end_token, mask)

    def _packed(self, group: Sequence[Chunk], start: int, window: int | None) -> PackedChunks:
        firsts = [first_block(chunk, window) for chunk in group]
        lengths = [_block_count(chunk) - first for chunk, first in zip(group, firsts, strict=True)]
        width = max(lengths)
        table: list[int] = []
        for chunk, first, length in zip(group, firsts, lengths, strict=True):
            blocks = chunk.sequence.blocks
            table += blocks[first : first + length]
            # Others' blocks may be out of bounds for this process, so padding names one's own.
            table += [blocks[first + length - 1]] * (width - length)
        keys = torch.arange(width * KV_BLOCK_TOKENS, device=self._device)
        keys = keys[None, :] + self._integers(firsts)[:, None] * KV_BLOCK_TOKENS
        queries = max(chunk.count for chunk in group)
        # A padded query is its chunk's last one again, so no row is without anything to see.
        positions = [[min(c.start + q, c.end - 1) for q in range(queries)] for c in group]
        mask = self._mask(keys, torch.tensor(positions, device=self._device), window)
        if queries > 1:
            mask = mask.repeat(1, self._shared_heads, 1)
        padded_rows, real_places = self._padding(group, queries)
        return PackedChunks(
            start=start,
            end=start + sum(chunk.count for chunk in group),
            sequences=len(group),
            table=self._integers(table),
            mask=mask[:, None],
            padded_rows=padded_rows,
            real_places=real_places,
        )

    def _padding(self, group: Sequence[Chunk], queries: int) -> tuple[Tensor | None, Tensor | None]:
        if queries == 1:
            return None, None
        rows: list[int] = []
        places: list[int] = []
        first_row = 0
        for number, chunk in enumerate(group):
            rows += [first_row + min(query, chunk.count - 1) for query in range(queries)]
            places += range(number * queries, number * queries + chunk.count)
            first_row += chunk.count
        return self._integers(rows), self._integers(places)

    def _mask(self, keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
        """Zero where a query sees a key, minus infinity elsewhere: `[..., queries, keys]`."""
        keys, queries = keys[..., None, :], queries[..., :, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _integers(self, values: Sequence[int]) -> Tensor:
        if self._device.type == "cpu":
            return torch.tensor(values, dtype=torch.long)
        pinned = torch.tensor(values, dtype=torch.long, pin_memory=True)
        return pinned.to(self._device, non_blocking=True)


def group_chunks(
    chunks: Sequence[Chunk], *, longest_packed: int, most_blocks: int | None = None
) -> list[list[Chunk]]:
    """Split chunks into groups of like shape: by queries and by blocks, each within a factor of two.

    A group reads at most `most_blocks` unless one chunk alone reads more.
    """
    buckets: dict[tuple[int, int, int], list[Chunk]] = {}
    for number, chunk in enumerate(chunks):
        alone = number if chunk.count > longest_packed else -1
        shape = (alone, _power_of_two(chunk.count), _power_of_two(_block_count(chunk)))
        buckets.setdefault(shape, []).append(chunk)
    groups: list[list[Chunk]] = []
    for shape in sorted(buckets):
        group = sorted(buckets[shape], key=_block_count)
        before = groups[-1] if groups else []
        if before and shape[0] < 0 and _padding_blocks(before, group) <= _MERGED_PADDING_BLOCKS:
            before += group
        else:
            groups.append(group)
    if most_blocks is None:
        return groups
    return [part for group in groups for part in _split_group(group, most_blocks)]


def _split_group(group: Sequence[Chunk], most_blocks: int) -> list[list[Chunk]]:
    parts: list[list[Chunk]] = [[]]
    width = 0
    for chunk in group:
        width = max(width, _block_count(chunk))
        if parts[-1] and (len(parts[-1]) + 1) * width > most_blocks:
            parts.append([])
            width = _block_count(chunk)
        parts[-1].append(chunk)
    return parts


def _padding_blocks(smaller: Sequence[Chunk], larger: Sequence[Chunk]) -> int:
    """Blocks that the first group would read in vain if it were part of the second."""
    queries = max(chunk.count for chunk in larger)
    if any(_power_of_two(chunk.count) != _power_of_two(queries) for chunk in smaller):
        return _MERGED_PADDING_BLOCKS + 1
    width = _block_count(larger[-1])
    return sum(width - _block_count(chunk) for chunk in smaller)


def _block_count(chunk: Chunk) -> int:
    return -(-chunk.end // KV_BLOCK_TOKENS)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
