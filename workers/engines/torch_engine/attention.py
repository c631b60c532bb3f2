"""From queries to mixed values over keys and values in blocks: the port, and what works everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from workers.engines.torch_engine.batch import Attention, PackedChunks, SingleChunk
from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.kv_pool import KvPool
from workers.engines.torch_engine.ragged import RaggedChunks

_STRIPE_ROWS = 32
"""Rows whose scores of all heads stay in a core's cache."""


class AttentionPath(Protocol):
    """One way to attend."""

    name: str
    is_ragged: bool
    """Whether a batch comes as one `RaggedChunks` and not in groups."""

    def mix(
        self,
        parts: Sequence[Attention],
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
        pool: KvPool,
        layer: int,
    ) -> Tensor:
        """Attend from `[rows, heads, size]` to `[rows, heads * size]`.

        `fresh` are the keys and values of the rows, `[rows, kv_heads, size]`, which are in the pool too.
        """
        ...


class GroupedAttention:
    """Scaled dot products group by group, as `batch` forms them: for every device and type.

    Query heads that share a key-value head are laid along the query axis, so that attention never
    copies keys or values to repeat them.
    """

    name: str = "grouped"
    is_ragged: bool = False

    def __init__(self, config: ModelConfig) -> None:
        """Attend for models of this shape."""
        self._heads, self._kv_heads, self._size = config.heads, config.kv_heads, config.head_size
        self._shared = config.heads // config.kv_heads
        self._scale = config.head_size**-0.5
        self._hidden = torch.full((_STRIPE_ROWS, _STRIPE_ROWS), float("-inf")).triu_(1)
        """Added to scores of as many rows with one another, on a CPU."""

    def mix(
        self,
        parts: Sequence[Attention],
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
        pool: KvPool,
        layer: int,
    ) -> Tensor:
        """See `AttentionPath`."""
        mixed = []
        for part in parts:
            if isinstance(part, RaggedChunks):
                raise TypeError("grouped attention takes groups")
            rows = query[part.start : part.end]
            if isinstance(part, PackedChunks):
                mixed.append(self._attend_packed(part, rows, pool.gather(layer, part.table)))
            elif part.table is None:
                seen = (fresh[0][part.start : part.end], fresh[1][part.start : part.end])
                mixed.append(self._attend_single(part, rows, seen))
            else:
                mixed.append(self._attend_single(part, rows, self._visible(part, pool, layer)))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend_packed(self, part: PackedChunks, query: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
        """Attend from a few rows of each sequence: `[rows, heads, size]` to `[rows, heads * size]`."""
        shape = (part.sequences, -1, self._kv_heads, self._size)
        key, value = (blocks.view(shape).transpose(1, 2) for blocks in seen)
        if part.padded_rows is not None:
            query = query[part.padded_rows]
        folded = query.reshape(part.sequences, -1, self._kv_heads, self._shared, self._size)
        folded = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)
        mixed = functional.scaled_dot_product_attention(folded, key, value, attn_mask=part.mask)
        mixed = mixed.view(part.sequences, self._kv_heads, self._shared, -1, self._size)
        mixed = mixed.permute(0, 3, 1, 2, 4).reshape(-1, self._heads * self._size)
        return mixed if part.real_places is None else mixed[part.real_places]

    def _visible(self, part: SingleChunk, pool: KvPool, layer: int) -> tuple[Tensor, Tensor]:
        if part.table is None:
            raise ValueError("a chunk without a table sees itself only")
        span = slice(part.first_token, part.end_token)
        key, value = pool.gather(layer, part.table)
        return key.flatten(0, 1)[span], value.flatten(0, 1)[span]

    def _attend_single(self, part: SingleChunk, query: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
        """Attend from rows of one sequence to `seen`, keys and values `[tokens, kv_heads, size]`."""
        rows = len(query)
        if rows == 1:
            return self._attend_once(query, seen)
        if rows > _STRIPE_ROWS and query.device.type == "cpu" and query.dtype == torch.float32:
            return self._attend_in_stripes(part, query, seen)
        # Key-value heads take the batch's axis, so that those that share one see it without a copy.
        key, value = (tensor.transpose(0, 1)[:, None].expand(-1, self._shared, -1, -1) for tensor in seen)
        query = query.reshape(rows, self._kv_heads, self._shared, self._size).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=part.mask, is_causal=part.table is None and rows > 1
        )
        return mixed.permute(2, 0, 1, 3).reshape(rows, -1)

    def _attend_once(self, query: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
        """Attend from a row that sees everything: heads that share keys and values read them together."""
        key, value = (tensor.transpose(0, 1)[None] for tensor in seen)
        folded = query.reshape(1, self._kv_heads, self._shared, self._size)
        return functional.scaled_dot_product_attention(folded, key, value).reshape(1, -1)

    def _attend_in_stripes(self, part: SingleChunk, query: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
        """Attend from a few rows after the other, each time to no more than the last of them sees.

        On a CPU in float32, matrices of all heads that share keys and values beat the fused kernel by up
        to half.
        """
        rows, (key, value) = len(query), (tensor.transpose(0, 1) for tensor in seen)
        before = key.shape[1] - rows
        mixed = torch.empty_like(query)
        for start in range(0, rows, _STRIPE_ROWS):
            stripe = query[start : start + _STRIPE_ROWS]
            count = len(stripe)
            visible = before + start + count
            folded = (stripe * self._scale).view(count, self._kv_heads, self._shared, self._size)
            folded = folded.permute(1, 2, 0, 3).reshape(self._kv_heads, -1, self._size)
            scores = torch.bmm(folded, key[:, :visible].transpose(1, 2))
            scores = scores.view(self._kv_heads, self._shared, count, visible)
            if part.mask is None:
                scores[..., before + start :] += self._hidden[:count, :count]
            else:
                scores += part.mask[start : start + count, :visible]
            weights = scores.softmax(dim=-1).view(self._kv_heads, -1, visible)
            drawn = torch.bmm(weights, value[:, :visible])
            drawn = drawn.view(self._kv_heads, self._shared, count, self._size).permute(2, 0, 1, 3)
            mixed[start : start + count] = drawn.reshape(count, -1, self._size)
        return mixed.view(rows, -1)
