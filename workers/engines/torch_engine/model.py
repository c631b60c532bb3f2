"""The decoder: one forward pass over a step's rows, keys and values read from the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from workers.engines.torch_engine.attention import AttentionPath, GroupedAttention
from workers.engines.torch_engine.batch import BatchBuilder, StepBatch
from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.kv_pool import KvPool
from workers.engines.torch_engine.linear import Linear
from workers.engines.torch_engine.rotary import RotaryTable, Rotation, rotate
from workers.engines.torch_engine.sampling import Choice, choose_tokens
from workers.engines.torch_engine.scheduler import Chunk
from workers.engines.torch_engine.weights import LayerWeights, ModelWeights
from workers.protocol.digests import KV_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer, ready to multiply."""

    window: int | None
    input_norm: Tensor
    qkv: Linear
    query_key_norm: Tensor | None
    """`[heads + kv_heads, head_size]`"""
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


_GROUP_BYTES = 1024 * 1024
"""Of keys and values that attention reads at once on a CPU: what stays in a core's cache between gathering
and multiplying costs half of what goes through memory."""


ChoiceOf = Callable[[Chunk], Choice]
"""How the token that follows a chunk is chosen; asked once for each one that samples."""


class StepModel(Protocol):
    """What the loop computes steps with."""

    def compute(self, chunks: Sequence[Chunk], choice_of: ChoiceOf) -> list[tuple[Chunk, int]]:
        """Fill the chunks' slots; return those that sample, in any order, each with its next token."""
        ...


class Decoder:
    """A decoder of the Llama family over a paged KV pool, or one stage of it."""

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
        self._head = None if weights.head is None else Linear(weights.head)
        self._place = weights.layers[0].input_norm
        self._layers = tuple(
            _prepare(layer, window, config)
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
            group_blocks=_group_blocks(config, self.dtype) if self.device.type == "cpu" else None,
        )
        self._rotary = RotaryTable(config, device=self.device, dtype=self.dtype)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._place.device

    @property
    def attention_name(self) -> str:
        """How it attends."""
        return self._attention.name

    @property
    def is_last(self) -> bool:
        """Whether logits come out, and not rows for the next stage."""
        return self._head is not None

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._place.dtype

    def lay_out(self, chunks: Sequence[Chunk]) -> StepBatch:
        """Turn a step's chunks into what `forward` takes."""
        return self._builder.build(chunks)

    def lay_out_groups(self, groups: Sequence[Sequence[Chunk]]) -> StepBatch:
        """The same for chunks that another stage has grouped: rows have to be in its order."""
        return self._builder.build_groups(groups)

    def compute(self, chunks: Sequence[Chunk], choice_of: ChoiceOf) -> list[tuple[Chunk, int]]:
        """See `StepModel`."""
        batch = self.lay_out(chunks)
        choices = [choice_of(chunk) for chunk in batch.sampled_chunks]
        return list(zip(batch.sampled_chunks, choose_tokens(self.forward(batch), choices), strict=True))

    @torch.inference_mode()
    def forward(self, batch: StepBatch, hidden: Tensor | None = None) -> Tensor:
        """Compute all rows, fill their slots, return float32 logits of the sampled rows.

        A stage behind the first goes on from `hidden`, `[rows, hidden_size]`; all but the last return that.
        """
        if hidden is None:
            hidden = self._embed(batch)
        rotation = self._rotary.rows(batch.positions)
        for index, layer in enumerate(self._layers):
            mixed = self._attend(index, layer, hidden, batch, rotation)
            if self.is_last and index == len(self._layers) - 1:
                # Nobody attends to what comes out of the last layer: only rows that sample need it.
                mixed, hidden = mixed[batch.sampled_rows], hidden[batch.sampled_rows]
            hidden = layer.output(mixed).add_(hidden)
            hidden = self._feed_forward(layer, hidden).add_(hidden)
        if self._norm is None or self._head is None:
            return hidden
        return self._head(self._normalize(hidden, self._norm)).float()

    def _embed(self, batch: StepBatch) -> Tensor:
        if self._embedding is None:
            raise ValueError("only the first stage begins with tokens")
        return functional.embedding(batch.tokens, self._embedding)

    def _attend(
        self, index: int, layer: _Layer, hidden: Tensor, batch: StepBatch, rotation: Rotation
    ) -> Tensor:
        """Return what each row draws from those it sees, `[rows, heads * head_size]`."""
        config = self._config
        rows = layer.qkv(self._normalize(hidden, layer.input_norm))
        rows = rows.view(len(hidden), -1, config.head_size)
        # Queries and keys are treated alike, so as one: half the calls.
        turned = rows[:, : -config.kv_heads]
        if layer.query_key_norm is not None:
            turned = functional.rms_norm(turned, (config.head_size,), None, config.norm_epsilon)
            turned = turned.mul_(layer.query_key_norm)
        query, key = torch.split(rotate(turned, rotation), [config.heads, config.kv_heads], dim=1)
        fresh = self._pool.write(index, batch.slots, key, rows[:, -config.kv_heads :])
        return self._attention.mix(batch.attention[layer.window], query, fresh, self._pool, index)

    def _feed_forward(self, layer: _Layer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._normalize(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(functional.silu(gate).mul_(up))

    def _normalize(self, rows: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(rows, (rows.shape[-1],), weight, self._config.norm_epsilon)


def _group_blocks(config: ModelConfig, dtype: torch.dtype) -> int:
    block_bytes = 2 * config.kv_heads * config.head_size * KV_BLOCK_TOKENS * dtype.itemsize
    return max(1, _GROUP_BYTES // block_bytes)


def _prepare(layer: LayerWeights, window: int | None, config: ModelConfig) -> _Layer:
    norm = None
    if layer.query_norm is not None and layer.key_norm is not None:
        each = (layer.query_norm.expand(config.heads, -1), layer.key_norm.expand(config.kv_heads, -1))
        norm = torch.cat(each)
    return _Layer(
        window=window,
        input_norm=layer.input_norm,
        qkv=Linear(layer.qkv, layer.qkv_bias),
        query_key_norm=norm,
        output=Linear(layer.output, layer.output_bias),
        mlp_norm=layer.mlp_norm,
        gate_up=Linear(layer.gate_up),
        down=Linear(layer.down),
    )
