"""A step's chunks as tensors. Attention masks are made once a step, not once a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engines.torch_engine.scheduler import Chunk
from workers.protocol.digests import KV_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """The first rows of a batch: sequences with one new token each, padded to the longest."""

    rows: int
    tables: Tensor
    """`[rows * blocks]` block numbers; padding repeats a row's own last block and is masked."""
    mask: Tensor
    """`[rows, 1, 1, blocks * block_tokens]`, added to the scores."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows `start:end` of a batch: several new tokens of one sequence."""

    start: int
    end: int
    table: Tensor
    """`[blocks]` block numbers."""
    mask: Tensor
    """`[end - start, blocks * block_tokens]`, added to the scores."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All rows of a step, one row for each new token."""

    tokens: Tensor
    positions: Tensor
    slots: tuple[Tensor, Tensor]
    """Where each row's key and value go: block numbers, and places inside those blocks."""
    decode: DecodeGroup | None
    prefills: tuple[PrefillChunk, ...]
    sampled_rows: Tensor
    """Rows whose logits are wanted, in the order of `sampled_chunks`."""
    sampled_chunks: tuple[Chunk, ...]


def build_batch(chunks: Sequence[Chunk], *, device: torch.device, dtype: torch.dtype) -> StepBatch:
    """Lay the chunks out as rows, decoding ones first."""
    decodes = [chunk for chunk in chunks if chunk.count == 1]
    ordered = decodes + [chunk for chunk in chunks if chunk.count > 1]
    tokens: list[int] = []
    positions: list[int] = []
    slot_blocks: list[int] = []
    prefills: list[PrefillChunk] = []
    sampled_rows: list[int] = []
    for chunk in ordered:
        first_row = len(tokens)
        tokens += chunk.sequence.tokens[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        slot_blocks += [chunk.sequence.blocks[at // KV_BLOCK_TOKENS] for at in range(chunk.start, chunk.end)]
        if chunk.count > 1:
            prefills.append(_prefill(chunk, first_row, device, dtype))
        if chunk.samples:
            sampled_rows.append(len(tokens) - 1)
    places = torch.tensor(positions, device=device)
    return StepBatch(
        tokens=torch.tensor(tokens, device=device),
        positions=places,
        slots=(torch.tensor(slot_blocks, device=device), places % KV_BLOCK_TOKENS),
        decode=_decode_group(decodes, device, dtype) if decodes else None,
        prefills=tuple(prefills),
        sampled_rows=torch.tensor(sampled_rows, dtype=torch.long, device=device),
        sampled_chunks=tuple(chunk for chunk in ordered if chunk.samples),
    )


def _decode_group(chunks: Sequence[Chunk], device: torch.device, dtype: torch.dtype) -> DecodeGroup:
    lengths = torch.tensor([chunk.end for chunk in chunks], device=device)
    width = max(_block_count(chunk) for chunk in chunks)
    tables = [_padded(chunk.sequence.blocks[: _block_count(chunk)], width) for chunk in chunks]
    places = torch.arange(width * KV_BLOCK_TOKENS, device=device)
    mask = _additive(places[None, :] < lengths[:, None], dtype)
    return DecodeGroup(
        rows=len(chunks),
        tables=torch.tensor(tables, device=device).flatten(),
        mask=mask[:, None, None, :],
    )


def _padded(blocks: list[int], width: int) -> list[int]:
    """Lengthen a table by its own last block: others' blocks may be out of bounds for this process."""
    return blocks + blocks[-1:] * (width - len(blocks))


def _prefill(chunk: Chunk, first_row: int, device: torch.device, dtype: torch.dtype) -> PrefillChunk:
    width = _block_count(chunk)
    places = torch.arange(width * KV_BLOCK_TOKENS, device=device)
    positions = torch.arange(chunk.start, chunk.end, device=device)
    return PrefillChunk(
        start=first_row,
        end=first_row + chunk.count,
        table=torch.tensor(chunk.sequence.blocks[:width], device=device),
        mask=_additive(places[None, :] <= positions[:, None], dtype),
    )


def _block_count(chunk: Chunk) -> int:
    return -(-chunk.end // KV_BLOCK_TOKENS)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))
