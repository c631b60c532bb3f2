"""The tensors behind the KV blocks: of this process alone, or the node's arena."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.settings import EngineSettings
from workers.kv.arena import CpuArena
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
    """`[blocks, layers, 2, block_tokens, kv_heads, head_size]`, contiguous."""
    keys: Tensor
    """The same memory as `[layers, blocks, block_tokens, kv_heads, head_size]`."""
    values: Tensor

    @staticmethod
    def over(blocks: Tensor) -> KvPool:
        """Make a pool over memory that is there."""
        return KvPool(blocks, blocks[:, :, 0].transpose(0, 1), blocks[:, :, 1].transpose(0, 1))

    @property
    def total_blocks(self) -> int:
        """Blocks that have an address; of an arena, only leased ones may be touched."""
        return self.blocks.shape[0]

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's content over another's."""
        self.blocks[target].copy_(self.blocks[source])

    def export_block(self, block: int) -> memoryview:
        """Content of a block as bytes: the memory itself on a CPU, a copy of it elsewhere."""
        content = self.blocks[block]
        if content.device.type != "cpu":
            content = content.cpu()
        raw = (ctypes.c_ubyte * content.nbytes).from_address(content.data_ptr())
        raw.kept = content  # type: ignore[attr-defined]  # the view keeps the copy alive
        return memoryview(raw)

    def import_block(self, block: int, content: bytes | bytearray | memoryview) -> None:
        """Replace a block's content. Raises `ValueError` if it is not a whole block."""
        target = self.blocks[block]
        if len(content) != target.nbytes:
            raise ValueError(f"a block has {target.nbytes} bytes, not {len(content)}")
        source = torch.frombuffer(bytearray(content), dtype=target.dtype).view(target.shape)
        target.copy_(source)


def layout_of(config: ModelConfig, dtype: torch.dtype, device_uuid: str = "") -> KvLayout:
    """Describe this model's blocks for the node's pool."""
    return KvLayout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        dtype=str(dtype).removeprefix("torch."),
        block_tokens=KV_BLOCK_TOKENS,
        kind=device_uuid or "cpu",
    )


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
    """Allocate a pool of this process alone, zeroed: what is masked is read, and garbage could be NaN."""
    return KvPool.over(torch.zeros(_shape(config, blocks), dtype=dtype, device=device))


def map_pool(config: ModelConfig, arena: CpuArena, *, dtype: torch.dtype) -> KvPool:
    """Lay tensors over the node's arena. Only leased extents may be touched, and none after its end."""
    flat = torch.frombuffer(arena.buffer(), dtype=dtype)
    one = block_bytes(config, dtype) // dtype.itemsize
    blocks = flat.numel() // one
    return KvPool.over(flat[: blocks * one].view(_shape(config, blocks)))


def _shape(config: ModelConfig, blocks: int) -> tuple[int, ...]:
    return (blocks, config.layers, 2, KV_BLOCK_TOKENS, config.kv_heads, config.head_size)
