"""The decoder: one forward pass over a step's rows, keys and values read from the pool."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from workers.engines.torch_engine.batch import DecodeGroup, PrefillChunk, StepBatch
from workers.engines.torch_engine.config import ModelConfig, RopeConfig
from workers.engines.torch_engine.kv_pool import KvPool
from workers.engines.torch_engine.weights import LayerWeights, ModelWeights


class Decoder:
    """A decoder of the Llama family over a paged KV pool.

    Query heads that share a key-value head are laid along the query axis, so that attention never
    copies keys or values to repeat them.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, pool: KvPool) -> None:
        """Bind weights and pool; both stay on their device."""
        self._config = config
        self._weights = weights
        self._pool = pool
        self._shared = config.heads // config.kv_heads
        cosine, sine = rotary_tables(config, device=weights.norm.device, dtype=weights.norm.dtype)
        self._cosine = cosine
        self._sine = sine

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._weights.norm.device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._weights.norm.dtype

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Compute all rows, fill their slots, return float32 logits of the sampled rows."""
        hidden = functional.embedding(batch.tokens, self._weights.embedding)
        # [rows, 1, head_size]: the middle axis is the heads.
        cosine = self._cosine[batch.positions].unsqueeze(1)
        sine = self._sine[batch.positions].unsqueeze(1)
        for index, layer in enumerate(self._weights.layers):
            hidden = hidden + self._attend(index, layer, hidden, batch, (cosine, sine))
            hidden = hidden + self._feed_forward(layer, hidden)
        wanted = self._normalize(hidden[batch.sampled_rows], self._weights.norm)
        return functional.linear(wanted, self._weights.head).float()

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        batch: StepBatch,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        config = self._config
        normed = self._normalize(hidden, layer.input_norm)
        rows = functional.linear(normed, layer.qkv, layer.qkv_bias)
        rows = rows.view(len(hidden), -1, config.head_size)
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        query, key, value = torch.split(rows, sizes, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._normalize(query, layer.query_norm)
            key = self._normalize(key, layer.key_norm)
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        keys, values = self._pool.keys[index], self._pool.values[index]
        keys.index_put_(batch.slots, key)
        values.index_put_(batch.slots, value)
        parts = []
        if batch.decode is not None:
            parts.append(self._decode(query[: batch.decode.rows], keys, values, batch.decode))
        parts += [self._prefill(query[c.start : c.end], keys, values, c) for c in batch.prefills]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return functional.linear(mixed, layer.output, layer.output_bias)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup) -> Tensor:
        """Attend from one row of each sequence: `[rows, heads, size]` to `[rows, heads * size]`."""
        config = self._config
        shape = (group.rows, -1, config.kv_heads, config.head_size)
        key = keys.index_select(0, group.tables).view(shape).transpose(1, 2)
        value = values.index_select(0, group.tables).view(shape).transpose(1, 2)
        folded = query.reshape(group.rows, config.kv_heads, self._shared, config.head_size)
        mixed = functional.scaled_dot_product_attention(folded, key, value, attn_mask=group.mask)
        return mixed.reshape(group.rows, -1)

    def _prefill(self, query: Tensor, keys: Tensor, values: Tensor, chunk: PrefillChunk) -> Tensor:
        """Attend from several rows of one sequence: `[rows, heads, size]` to `[rows, heads * size]`."""
        config, rows = self._config, len(query)
        key = keys[chunk.table].flatten(0, 1).transpose(0, 1)
        value = values[chunk.table].flatten(0, 1).transpose(0, 1)
        folded = query.view(rows, config.kv_heads, self._shared, config.head_size)
        folded = folded.permute(1, 2, 0, 3).flatten(1, 2)
        mask = chunk.mask.repeat(self._shared, 1)
        mixed = functional.scaled_dot_product_attention(folded[None], key[None], value[None], attn_mask=mask)
        unfolded = mixed[0].view(config.kv_heads, self._shared, rows, config.head_size)
        return unfolded.permute(2, 0, 1, 3).reshape(rows, -1)

    def _feed_forward(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        normed = self._normalize(hidden, layer.mlp_norm)
        gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, layer.down)

    def _normalize(self, rows: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(rows, (rows.shape[-1],), weight, self._config.norm_epsilon)


def rotary_tables(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each `[max_position_tokens, head_size]`, both halves alike."""
    places = torch.arange(config.max_position_tokens, dtype=torch.float32)
    angles = torch.outer(places, _rotary_frequencies(config.rope, config.head_size))
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos().to(device, dtype), doubled.sin().to(device, dtype)


def _rotary_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(frequencies, rope)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position_tokens / rope.low_freq_factor
    shortest = rope.original_max_position_tokens / rope.high_freq_factor
    smooth = (rope.original_max_position_tokens / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, blended)
    return torch.where(wavelengths < shortest, frequencies, scaled)


def _rotate(rows: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = rows.chunk(2, dim=-1)
    return rows * cosine + torch.cat((-second, first), dim=-1) * sine
