"""Where a replica's KV lies: in memory of its own, or in the node's pool if it was given one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine.borrowed_memory import tensor_over
from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.kv_pool import KvPool, allocate_pool, lay_pool, layout_of
from workers.engines.torch_engine.kv_room import KvRoom, PooledRoom, PrivateRoom
from workers.engines.torch_engine.settings import EngineSettings
from workers.kv.arena import CpuArena
from workers.kv.lease import PoolMember, Terms, join
from workers.kv.tiers.heat import Heat
from workers.protocol.digests import KV_BLOCK_TOKENS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Tensors, their bookkeeping, and where more comes from."""

    pool: KvPool
    allocator: BlockAllocator
    room: KvRoom
    max_model_tokens: int
    """Longest request: what this replica can always hold, whatever others do."""


@dataclass(frozen=True, slots=True)
class KvKind:
    """What keys and values are kept as, what they are computed in, and where."""

    dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device


def open_kv_memory(
    settings: EngineSettings, config: ModelConfig, blocks: int, kind: KvKind, heat: Heat
) -> KvMemory:
    """Set `blocks` aside, or join the node's pool and bring them; `heat` orders evictions.

    Raises `PoolJoinError`, `OSError`.
    """
    if settings.kv_pool_dir is not None and kind.device.type == "cpu":
        return _join_pool(settings, settings.kv_pool_dir, config, blocks, kind, heat=heat)
    if settings.kv_pool_dir is not None:
        log.warning("no pool of the node on %s yet: KV memory is this replica's alone", kind.device.type)
    pool = allocate_pool(
        config, blocks, dtype=kind.dtype, device=kind.device, compute_dtype=kind.compute_dtype
    )
    length = model_length(settings, config, blocks)
    log.info("%d KV blocks of this replica alone, at most %d tokens a request", blocks, length)
    return KvMemory(pool, BlockAllocator(blocks, heat=heat), PrivateRoom(), length)


def _join_pool(
    settings: EngineSettings, folder: Path, config: ModelConfig, blocks: int, kind: KvKind, *, heat: Heat
) -> KvMemory:
    layout = layout_of(config, kind.dtype)
    terms = Terms(blocks, settings.kv_min_blocks, settings.kv_max_blocks)
    length = model_length(settings, config, terms.guaranteed_blocks(layout))
    member = join(
        folder,
        layout,
        settings.replica_id,
        settings.attempt,
        replace(terms, longest_blocks=-(-length // KV_BLOCK_TOKENS)),
        fixed_bytes=settings.kv_pool_bytes,
    )
    arena = _memory_of(member)
    memory = tensor_over(arena.address, arena.size_bytes, kind.device)
    pool = lay_pool(config, memory, dtype=kind.dtype, compute_dtype=kind.compute_dtype)
    allocator = BlockAllocator(extent_blocks=member.extent_blocks, heat=heat)
    log.info(
        "in the node's KV pool %s: brings %d blocks, %d guaranteed, at most %d tokens a request",
        layout.pool_id,
        blocks,
        member.guaranteed_blocks,
        length,
    )
    return KvMemory(pool, allocator, PooledRoom(member, allocator, pool.copy_block), length)


def _memory_of(member: PoolMember) -> CpuArena:
    arena = member.arena
    if not isinstance(arena, CpuArena):
        raise TypeError(f"no tensors can be laid over a {type(arena).__name__}")
    return arena


def model_length(settings: EngineSettings, config: ModelConfig, blocks: int) -> int:
    """Length limit of a request: as told, as trained, and never more than the blocks can hold."""
    wanted = settings.max_model_len or config.max_position_tokens
    length = min(wanted, config.max_position_tokens, blocks * KV_BLOCK_TOKENS)
    if length < wanted:
        log.warning("a request's length is limited to %d tokens, not %d", length, wanted)
    return length
