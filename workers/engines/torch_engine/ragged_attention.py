"""Attention kernels that take sequences of all lengths in one launch.

Imported only where one of them may be used: their imports take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from workers.engines.torch_engine.batch import Attention
from workers.engines.torch_engine.kv_pool import KvPool
from workers.engines.torch_engine.ragged import RaggedChunks

_FLEX_BLOCK = 128
"""Queries and keys that flex attention skips or computes together."""


class VarlenAttention:
    """Flash attention over all sequences in one launch: CUDA, float16 and bfloat16.

    Paged, the kernel reads the pool's blocks where they lie, which only newer kernels do for blocks of
    16 tokens; else they are gathered first, by one copy for all sequences.
    """

    is_ragged: bool = True

    def __init__(self, *, paged: bool) -> None:
        """Choose how blocks are read."""
        self._paged = paged
        self.name = "varlen_paged" if paged else "varlen"

    def mix(
        self,
        parts: Sequence[Attention],
        query: Tensor,
        fresh: tuple[Tensor, Tensor],  # noqa: ARG002 - a port: it is in the pool too
        pool: KvPool,
        layer: int,
    ) -> Tensor:
        """See `AttentionPath`."""
        part = _only(parts)
        if self._paged:
            key, value = pool.keys[layer], pool.values[layer]
        else:
            key, value = (blocks.flatten(0, 1) for blocks in pool.gather(layer, part.table))
        mixed = varlen_attn(
            query,
            key,
            value,
            part.query_starts,
            None if self._paged else part.key_starts,
            part.most_queries,
            part.most_keys,
            window_size=(-1 if part.window is None else part.window - 1, 0),
            enable_gqa=True,
            seqused_k=part.key_counts,
            block_table=part.paged_table if self._paged else None,
        )
        if not isinstance(mixed, Tensor):
            raise TypeError("varlen_attn returned more than the mixed values")
        return mixed.flatten(1)


class FlexAttention:
    """Flex attention over all sequences in one launch; compiled on CUDA, where it needs Triton.

    Blocks of queries skip all blocks of keys but those of their own sequences. On a CPU it runs without
    being compiled, computes all scores and masks them: right, and slow.
    """

    name: str = "flex"
    is_ragged: bool = True

    def __init__(self, *, compiled: bool) -> None:
        """Compile at first use, or not at all."""
        self._attend: Callable[..., Any] = flex_attention
        if compiled:
            self._attend = torch.compile(flex_attention, dynamic=True)
        self._masks: dict[int, tuple[RaggedChunks, BlockMask]] = {}
        """By window, 0 for none: one mask serves all layers of a step."""

    def mix(
        self,
        parts: Sequence[Attention],
        query: Tensor,
        fresh: tuple[Tensor, Tensor],  # noqa: ARG002 - a port: it is in the pool too
        pool: KvPool,
        layer: int,
    ) -> Tensor:
        """See `AttentionPath`."""
        part = _only(parts)
        key, value = (blocks.flatten(0, 1).transpose(0, 1)[None] for blocks in pool.gather(layer, part.table))
        mixed: Tensor = self._attend(
            query.transpose(0, 1)[None], key, value, block_mask=self._mask_of(part), enable_gqa=True
        )
        return mixed[0].transpose(0, 1).flatten(1)

    def _mask_of(self, part: RaggedChunks) -> BlockMask:
        known = self._masks.get(part.window or 0)
        if known is None or known[0] is not part:
            known = (part, flex_mask(part))
            self._masks[part.window or 0] = known
        return known[1]


def _only(parts: Sequence[Attention]) -> RaggedChunks:
    (part,) = parts
    if not isinstance(part, RaggedChunks):
        raise TypeError("this attention takes all rows of a batch at once")
    return part


def flex_mask(part: RaggedChunks) -> BlockMask:
    """Say which blocks of gathered keys hold a block of queries' own sequences, and what is seen there."""
    device, rows, window = part.table.device, part.rows, part.window
    sequences = torch.arange(part.sequences, device=device)
    counts = part.query_starts.diff()
    tokens = len(part.table) * _tokens_of_a_block(part)
    owner_of_row = torch.repeat_interleave(sequences, counts, output_size=rows)
    owner_of_key = torch.repeat_interleave(sequences, part.key_starts.diff(), output_size=tokens)
    ends = part.first_positions + part.key_counts
    row_shift = ends - counts - part.query_starts[:-1]
    key_shift = part.first_positions - part.key_starts[:-1]
    row_position = torch.arange(rows, device=device) + row_shift[owner_of_row]
    key_position = torch.arange(tokens, device=device) + key_shift[owner_of_key]

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        # Padding behind a sequence's last token is later than any row of it, so it is never seen.
        seen = (owner_of_row[row] == owner_of_key[key]) & (key_position[key] <= row_position[row])
        return seen if window is None else seen & (key_position[key] > row_position[row] - window)

    first_rows = torch.arange(0, rows, _FLEX_BLOCK, device=device)
    last_rows = (first_rows + _FLEX_BLOCK - 1).clamp_(max=rows - 1)
    first = part.key_starts[owner_of_row[first_rows]] // _FLEX_BLOCK
    end = -(-part.key_starts[owner_of_row[last_rows] + 1] // _FLEX_BLOCK)
    most = -(-tokens // _FLEX_BLOCK)
    blocks = (first[:, None] + torch.arange(most, device=device)).clamp_(max=most - 1)
    return BlockMask.from_kv_blocks(
        (end - first).to(torch.int32)[None, None],
        blocks.to(torch.int32)[None, None].contiguous(),
        BLOCK_SIZE=(_FLEX_BLOCK, _FLEX_BLOCK),
        mask_mod=sees,
        seq_lengths=(rows, tokens),
        compute_q_blocks=False,
    )


def _tokens_of_a_block(part: RaggedChunks) -> int:
    return part.most_keys // part.paged_table.shape[1]
