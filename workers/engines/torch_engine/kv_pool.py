"""The tensors behind the KV blocks, allocated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.settings import EngineSettings
from workers.protocol.digests import KV_BLOCK_TOKENS

_CUDA_FREE_RATIO = 0.85
"""Part of the memory left after the weights that goes to KV; the rest is for activations."""
_REPLICA_ACTIVATION_RATIO = 0.2
"""Part of a replica's memory budget that is neither weights nor KV."""
_CPU_DEFAULT_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KvPool:
    """Keys and values of all blocks, each `[layers, blocks, block_tokens, kv_heads, head_size]`."""

    keys: Tensor
    values: Tensor

    @property
    def total_blocks(self) -> int:
        """Blocks in the pool."""
        return self.keys.shape[1]


def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return config.kv_elements_per_token * KV_BLOCK_TOKENS * dtype.itemsize


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


def allocate_pool(config: ModelConfig, blocks: int, *, dtype: torch.dtype, device: torch.device) -> KvPool:
    """Allocate the pool, zeroed: padding reads it, and garbage could be NaN."""
    shape = (config.layers, blocks, KV_BLOCK_TOKENS, config.kv_heads, config.head_size)
    return KvPool(
        keys=torch.zeros(shape, dtype=dtype, device=device),
        values=torch.zeros(shape, dtype=dtype, device=device),
    )
