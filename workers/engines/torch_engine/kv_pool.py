"""The tensors behind the KV blocks: of this process alone, or the node's arena."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.kv_types import FP8, SCALE, dequantize, quantize, scale_bytes, type_name
from workers.engines.torch_engine.settings import EngineSettings
from workers.kv.layout import KvLayout
from workers.protocol.digests import KV_BLOCK_TOKENS

_CUDA_FREE_RATIO = 0.85
"""Part of the memory left after the weights that goes to KV; the rest is for activations."""
_REPLICA_ACTIVATION_RATIO = 0.2
"""Part of a replica's memory budget that is neither weights nor KV."""
_CPU_DEFAULT_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KvPool:
    """All blocks, block by block: a block is one range of bytes over all layers."""

    blocks: Tensor
    """`[blocks, layers, 2, block_tokens, kv_heads, head_size]`, contiguous; of 8-bit floats
    `[blocks, bytes]`, since their scales follow inside the block."""
    keys: Tensor
    """The same memory as `[layers, blocks, block_tokens, kv_heads, head_size]`."""
    values: Tensor
    scales: tuple[Tensor, Tensor] | None = None
    """Of keys and of values, `[layers, blocks, block_tokens, kv_heads]`; `None`: there are none."""
    compute_dtype: torch.dtype | None = None
    """What attention reads; `None`: the type that is kept."""

    @staticmethod
    def over(blocks: Tensor) -> KvPool:
        """Make a pool over memory that is there."""
        return KvPool(blocks, blocks[:, :, 0].transpose(0, 1), blocks[:, :, 1].transpose(0, 1))

    @property
    def total_blocks(self) -> int:
        """Blocks that have an address; of an arena, only leased ones may be touched."""
        return self.blocks.shape[0]

    @property
    def read_dtype(self) -> torch.dtype:
        """Type that `write` and `gather` return."""
        return self.compute_dtype or self.keys.dtype

    def write(
        self, layer: int, slots: tuple[Tensor, Tensor], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fill slots with rows `[rows, kv_heads, head_size]`; return them as they will be read.

        Attention uses what comes back, so that no token depends on whether its context was read from
        blocks or computed in the same step.
        """
        if self.scales is None:
            self.keys[layer].index_put_(slots, key)
            self.values[layer].index_put_(slots, value)
            return key, value
        return (
            _write_scaled(self.keys[layer], self.scales[0][layer], slots, key),
            _write_scaled(self.values[layer], self.scales[1][layer], slots, value),
        )

    def gather(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Copy blocks out of a layer: keys and values, each `[blocks, block_tokens, kv_heads, head_size]`."""
        if self.scales is None:
            return _gather(self.keys[layer], table), _gather(self.values[layer], table)
        dtype = self.read_dtype
        return (
            dequantize(_gather(self.keys[layer], table), _gather(self.scales[0][layer], table), dtype),
            dequantize(_gather(self.values[layer], table), _gather(self.scales[1][layer], table), dtype),
        )

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's content over another's."""
        self.blocks[target].copy_(self.blocks[source])

    def export_block(self, block: int) -> memoryview:
        """Content of a block as bytes: the memory itself on a CPU, a copy of it elsewhere."""
        content = self.blocks[block]
        if content.device.type != "cpu":
            content = content.cpu()
        return content.flatten().view(torch.uint8).numpy().data  # keeps the copy alive

    def import_block(self, block: int, content: bytes | bytearray | memoryview) -> None:
        """Replace a block's content. Raises `ValueError` if it is not a whole block."""
        target = self.blocks[block]
        if len(content) != target.nbytes:
            raise ValueError(f"a block has {target.nbytes} bytes, not {len(content)}")
        if target.device.type == "cpu":
            target.flatten().view(torch.uint8).numpy()[:] = np.frombuffer(content, np.uint8)
        else:
            target.copy_(torch.frombuffer(bytearray(content), dtype=target.dtype).view(target.shape))


def _write_scaled(codes: Tensor, scales: Tensor, slots: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
    new_codes, new_scales = quantize(rows)
    # As bytes: index_put_ knows no 8-bit floats.
    codes.view(torch.uint8).index_put_(slots, new_codes.view(torch.uint8))
    scales.index_put_(slots, new_scales)
    return dequantize(new_codes, new_scales, rows.dtype)


def _gather(blocks: Tensor, table: Tensor) -> Tensor:
    """Copy blocks; as a matrix of one row a block, which is what index_select copies fastest."""
    dtype, shape = blocks.dtype, (len(table), *blocks.shape[1:])
    plain = blocks.view(torch.uint8) if dtype == FP8 else blocks
    return plain.flatten(1).index_select(0, table).view(dtype).view(shape)


def layout_of(config: ModelConfig, dtype: torch.dtype, device_uuid: str = "") -> KvLayout:
    """Describe this model's blocks for the node's pool; `dtype` is what keys and values are kept as."""
    return KvLayout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        dtype=type_name(dtype),
        block_tokens=KV_BLOCK_TOKENS,
        kind=device_uuid or "cpu",
    )


def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    vectors = 2 * config.layers * KV_BLOCK_TOKENS * config.kv_heads
    return vectors * (config.head_size * dtype.itemsize + scale_bytes(dtype))


def choose_pool_blocks(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    settings: EngineSettings,
    *,
    weights_bytes: int,
) -> int:
    """Blocks to allocate: as told, else by the bytes told, else by what the device has free.

    Raises `ValueError` if not even one block fits.
    """
    if settings.num_blocks is not None:
        return settings.num_blocks
    budget = _budget_bytes(device, settings, weights_bytes)
    one = block_bytes(config, dtype)
    if budget < one:
        raise ValueError(f"{max(budget, 0)} bytes are left for KV, and one block takes {one}")
    return budget // one


def _budget_bytes(device: torch.device, settings: EngineSettings, weights_bytes: int) -> int:
    if settings.kv_memory_bytes is not None:
        return settings.kv_memory_bytes
    if settings.memory_bytes is not None:
        return int(settings.memory_bytes * (1 - _REPLICA_ACTIVATION_RATIO)) - weights_bytes
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _CUDA_FREE_RATIO)
    return _CPU_DEFAULT_BYTES


def allocate_pool(
    config: ModelConfig,
    blocks: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
) -> KvPool:
    """Allocate a pool of this process alone, zeroed: what is masked is read, and garbage could be NaN."""
    memory = torch.zeros(blocks * block_bytes(config, dtype), dtype=torch.uint8, device=device)
    return lay_pool(config, memory, dtype=dtype, compute_dtype=compute_dtype)


def lay_pool(
    config: ModelConfig, memory: Tensor, *, dtype: torch.dtype, compute_dtype: torch.dtype | None = None
) -> KvPool:
    """Lay blocks over memory, `[bytes]` of uint8: as many as fit. Nothing of it is touched."""
    one = block_bytes(config, dtype)
    blocks = len(memory) // one
    memory = memory[: blocks * one].view(blocks, one)
    shape = (config.layers, 2, KV_BLOCK_TOKENS, config.kv_heads, config.head_size)
    if scale_bytes(dtype) == 0:
        return KvPool.over(memory.view(dtype).view(blocks, *shape))
    split = one // (config.head_size + scale_bytes(dtype)) * config.head_size
    codes = torch.unflatten(memory[:, :split].view(dtype), 1, shape)
    scales = torch.unflatten(memory[:, split:].view(SCALE), 1, shape[:-1])
    return KvPool(
        memory,
        codes[:, :, 0].transpose(0, 1),
        codes[:, :, 1].transpose(0, 1),
        (scales[:, :, 0].transpose(0, 1), scales[:, :, 1].transpose(0, 1)),
        compute_dtype or torch.float32,
    )
