"""The decoder: one forward pass over a step's rows, keys and values read from the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from workers.engines.torch_engine.attention import AttentionPath, GroupedAttention
from workers.engines.torch_engine.batch import BatchBuilder, StepBatch
from workers.engines.torch_engine.config import ModelConfig, RopeConfig
from workers.engines.torch_engine.kv_pool import KvPool
from workers.engines.torch_engine.linear import Linear
from workers.engines.torch_engine.scheduler import Chunk
from workers.engines.torch_engine.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer, ready to multiply."""

    window: int | None
    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A decoder of the Llama family over a paged KV pool."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pool: KvPool,
        attention: AttentionPath | None = None,
    ) -> None:
        """Bind weights and pool; both stay on their device. Without `attention`, attend in groups."""
        self._config = config
        self._embedding = weights.embedding
        self._norm = weights.norm
        self._head = Linear(weights.head)
        self._layers = tuple(
            _prepare(layer, window)
            for layer, window in zip(weights.layers, config.layer_windows, strict=True)
        )
        self._pool = pool
        self._attention = attention or GroupedAttention(config)
        self._builder = BatchBuilder(
            device=self.device,
            dtype=self.dtype,
            shared_heads=config.heads // config.kv_heads,
            windows=config.layer_windows,
            ragged=self._attention.is_ragged,
        )
        self._cosine, self._sine = rotary_tables(config, device=self.device, dtype=self.dtype)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._norm.device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._norm.dtype

    def lay_out(self, chunks: Sequence[Chunk]) -> StepBatch:
        """Turn a step's chunks into what `forward` takes."""
        return self._builder.build(chunks)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Compute all rows, fill their slots, return float32 logits of the sampled rows."""
        hidden = functional.embedding(batch.tokens, self._embedding)
        # [rows, 1, head_size]: the middle axis is the heads.
        cosine = self._cosine[batch.positions].unsqueeze(1)
        sine = self._sine[batch.positions].unsqueeze(1)
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attend(index, layer, hidden, batch, (cosine, sine))
            hidden = hidden + self._feed_forward(layer, hidden)
        wanted = self._normalize(hidden[batch.sampled_rows], self._norm)
        return self._head(wanted).float()

    def _attend(
        self,
        index: int,
        layer: _Layer,
        hidden: Tensor,
        batch: StepBatch,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        config = self._config
        rows = layer.qkv(self._normalize(hidden, layer.input_norm))
        rows = rows.view(len(hidden), -1, config.head_size)
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        query, key, value = torch.split(rows, sizes, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._normalize(query, layer.query_norm)
            key = self._normalize(key, layer.key_norm)
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        fresh = self._pool.write(index, batch.slots, key, value)
        return layer.output(
            self._attention.mix(batch.attention[layer.window], query, fresh, self._pool, index)
        )

    def _feed_forward(self, layer: _Layer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._normalize(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(functional.silu(gate).mul_(up))

    def _normalize(self, rows: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(rows, (rows.shape[-1],), weight, self._config.norm_epsilon)


def _prepare(layer: LayerWeights, window: int | None) -> _Layer:
    return _Layer(
        window=window,
        input_norm=layer.input_norm,
        qkv=Linear(layer.qkv, layer.qkv_bias),
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        output=Linear(layer.output, layer.output_bias),
        mlp_norm=layer.mlp_norm,
        gate_up=Linear(layer.gate_up),
        down=Linear(layer.down),
    )


def rotary_tables(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each `[max_position_tokens, head_size]`, both halves alike."""
    places = torch.arange(config.max_position_tokens, dtype=torch.float32)
    angles = torch.outer(places, _rotary_frequencies(config.rope, config.head_size))
    doubled = torch.cat((angles, angles), dim=-1)
    factor = config.rope.attention_factor
    return (doubled.cos() * factor).to(device, dtype), (doubled.sin() * factor).to(device, dtype)


def _rotary_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn_frequencies(frequencies, rope)
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


def _yarn_frequencies(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """As with llama3, but the blend runs over dimensions, between two numbers of turns."""
    size = 2 * len(frequencies)

    def dimension_of(turns: float) -> float:
        around = rope.original_max_position_tokens / (turns * 2 * math.pi)
        return size * math.log(around) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a step rather than a division by zero
    stretched = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies


def _rotate(rows: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = rows.chunk(2, dim=-1)
    return rows * cosine + torch.cat((-second, first), dim=-1) * sine
