"""Where a replica's KV lies: in memory of its own, or in the node's pool if it was given one."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine.borrowed_memory import tensor_over
from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.holder_place import open_place
from workers.engines.torch_engine.kv_pool import KvPool, allocate_pool, lay_pool, layout_of
from workers.engines.torch_engine.kv_room import KvRoom, PooledRoom, PrivateRoom
from workers.engines.torch_engine.settings import EngineSettings
from workers.kv.arena import ARENA_FILE, Arenas, CpuArena, FileArenas
from workers.kv.held_arena import HeldArena, HeldArenas
from workers.kv.layout import KvLayout
from workers.kv.lease import PoolMember, Terms, join
from workers.kv.neighbour import PoolReader
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
    neighbours: PoolReader | None = None
    """Reads what other replicas of the node lend; `None`: this memory is not shared through a file."""


@dataclass(frozen=True, slots=True)
class KvKind:
    """What keys and values are kept as, what they are computed in, and where."""

    dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Place:
    """Which pool of the node this replica draws on."""

    kind: KvKind
    layout: KvLayout
    arenas: Arenas


def open_kv_memory(
    settings: EngineSettings, config: ModelConfig, blocks: int, kind: KvKind, heat: Heat
) -> KvMemory:
    """Set `blocks` aside, or join the node's pool and bring them; `heat` orders evictions.

    Raises `PoolJoinError`, `OSError`.
    """
    if settings.kv_pool_dir is not None:
        try:
            place = _find_place(settings, config, kind)
        except OSError as error:
            # Memory of its own is dearer, but it serves.
            log.warning("KV memory is this replica's alone: %s", error)
        else:
            return _join_pool(settings, settings.kv_pool_dir, config, blocks, place, heat=heat)
    pool = allocate_pool(
        config, blocks, dtype=kind.dtype, device=kind.device, compute_dtype=kind.compute_dtype
    )
    length = model_length(settings, config, blocks)
    log.info("%d KV blocks of this replica alone, at most %d tokens a request", blocks, length)
    return KvMemory(pool, BlockAllocator(blocks, heat=heat), PrivateRoom(), length)


def _join_pool(
    settings: EngineSettings,
    folder: Path,
    config: ModelConfig,
    blocks: int,
    place: _Place,
    *,
    heat: Heat,
) -> KvMemory:
    kind, layout = place.kind, place.layout
    terms = Terms(blocks, settings.kv_min_blocks, settings.kv_max_blocks)
    length = model_length(settings, config, terms.guaranteed_blocks(layout))
    member = join(
        folder,
        layout,
        settings.replica_id,
        settings.attempt,
        replace(terms, longest_blocks=-(-length // KV_BLOCK_TOKENS)),
        fixed_bytes=settings.kv_pool_bytes,
        arenas=place.arenas,
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
    room = PooledRoom(member, allocator, pool.copy_block)
    shared = isinstance(arena, CpuArena)
    reader = PoolReader(folder / layout.pool_id / ARENA_FILE, layout.block_bytes) if shared else None
    return KvMemory(pool, allocator, room, length, reader)


def _find_place(settings: EngineSettings, config: ModelConfig, kind: KvKind) -> _Place:
    """Say where a pool of the node can be for this device. Raises `OSError` with the reason if nowhere."""
    layout = layout_of(config, kind.dtype)
    if settings.kv_holder is not None:
        holder = open_place(settings.kv_holder, kind.device)
        hello = holder.link.hello
        layout = replace(layout, kind=hello.accelerator, page_bytes=hello.page_bytes)
        return _Place(kind, layout, HeldArenas(holder.memory, holder.link))
    if kind.device.type != "cpu":
        raise OSError(errno.ENOTSUP, f"nobody holds memory of {kind.device} for the replicas of this node")
    return _Place(kind, layout, FileArenas())


def _memory_of(member: PoolMember) -> CpuArena | HeldArena:
    arena = member.arena
    if not isinstance(arena, CpuArena | HeldArena):
        raise TypeError(f"no tensors can be laid over a {type(arena).__name__}")
    return arena


def model_length(settings: EngineSettings, config: ModelConfig, blocks: int) -> int:
    """Length limit of a request: as told, as trained, and never more than the blocks can hold."""
    wanted = settings.max_model_len or config.max_position_tokens
    length = min(wanted, config.max_position_tokens, blocks * KV_BLOCK_TOKENS)
    if length < wanted:
        log.warning("a request's length is limited to %d tokens, not %d", length, wanted)
    return length
