"""The memory of the tiers below a replica's blocks: a slab of host memory, and a file on disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine.kv_pool import KvPool
from workers.engines.torch_engine.settings import EngineSettings
from workers.kv.tiers.block_io import IoThread
from workers.kv.tiers.heat import Heat
from workers.kv.tiers.slot_file import SlotFile, slot_bytes
from workers.kv.tiers.store import TieredStore

log = logging.getLogger(__name__)

_QUEUED_BYTES = 64 * 1024 * 1024
"""Content on its way to the disk, which takes memory beside the tiers."""
_MEMORY_FACTS = Path("/proc/meminfo")
_FEWEST_QUEUED, _MOST_QUEUED = 8, 256


class SlabMover:
    """Copies blocks between a pool and a slab of host memory.

    On an accelerator the slab is pinned and copies go in the order of the computing stream, without a
    wait: whatever is computed after a copy sees it, and what a copy reads is overwritten only after it.
    """

    def __init__(self, pool: KvPool, host_blocks: int) -> None:
        """Set `host_blocks` aside. Raises `RuntimeError` if the memory cannot be had."""
        self._pool = pool
        self._rows = pool.blocks.flatten(1).view(torch.uint8)
        self.block_bytes = self._rows.shape[1]
        self._pinned = pool.blocks.device.type != "cpu"
        self._slab = torch.empty(
            (host_blocks, self.block_bytes), dtype=torch.uint8, pin_memory=self._pinned and host_blocks > 0
        )

    def to_host(self, block: int, slot: int) -> None:
        """Copy a block to a slot."""
        self._slab[slot].copy_(self._rows[block], non_blocking=self._pinned)

    def from_host(self, slot: int, block: int) -> None:
        """Copy a slot to a block."""
        self._rows[block].copy_(self._slab[slot], non_blocking=self._pinned)

    def fill_host(self, slots: Sequence[int], byte: int) -> None:
        """Fill slots that hold nothing."""
        self._slab[torch.tensor(slots)] = byte

    def read_host(self, slot: int) -> bytes:
        """Content of a slot."""
        if self._pinned:
            torch.cuda.current_stream(self._pool.blocks.device).synchronize()  # a copy may be on its way
        return self._slab[slot].numpy().tobytes()

    def export(self, block: int) -> bytes:
        """Content of a block."""
        return bytes(self._pool.export_block(block))

    def load(self, block: int, content: bytes | bytearray) -> None:
        """Replace a block's content."""
        self._pool.import_block(block, content)


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The tiers, and the thread that works for them, which is told whom to wake."""

    store: TieredStore
    io: IoThread | None
    blocks: int
    """Of all lower tiers."""

    def wake(self, nudge: Callable[[], None]) -> None:
        """Call `nudge` after each read from the disk."""
        if self.io is not None:
            self.io.on_read = nudge

    def close(self) -> None:
        """Give the disk's room back; once nothing uses the store any more."""
        self.store.close()
        if self.io is not None:
            self.io.join()


def open_tiers(
    settings: EngineSettings, pool: KvPool, allocator: BlockAllocator, heat: Heat
) -> OpenTiers | None:
    """Open what was asked for; `None` if nothing was. What cannot be had is off, with its reason."""
    if not (settings.kv_host_bytes or settings.kv_disk_bytes):
        return None
    mover, host_blocks, host_obstacle = _open_host(settings, pool)
    file, disk_blocks, disk_obstacle = _open_disk(settings, mover.block_bytes)
    io = None
    if file is not None:
        places = min(max(_QUEUED_BYTES // mover.block_bytes, _FEWEST_QUEUED), _MOST_QUEUED)
        io = IoThread(file, write_places=places)
    store = TieredStore(
        allocator,
        mover,
        heat,
        host_blocks=host_blocks if settings.kv_host_bytes else None,
        disk_blocks=disk_blocks if settings.kv_disk_bytes else None,
        io=io,
    )
    for tier, obstacle in (("host", host_obstacle), ("disk", disk_obstacle)):
        if obstacle:
            log.warning("no KV tier %s: %s", tier, obstacle)
            store.switch_off("host" if tier == "host" else "disk", obstacle)
    allocator.on_evict = store.lose
    log.info("KV tiers: %d blocks in host memory, %d on disk, %s", host_blocks, disk_blocks, heat.eviction)
    return OpenTiers(store, io, host_blocks + disk_blocks)


def _open_host(settings: EngineSettings, pool: KvPool) -> tuple[SlabMover, int, str]:
    """Set the slab aside; returns its blocks and what stands in the way."""
    mover = SlabMover(pool, 0)
    wanted, one = settings.kv_host_bytes, mover.block_bytes
    if not wanted:
        return mover, 0, ""
    if wanted < one:
        return mover, 0, f"kv_host_bytes is {wanted}, and one block takes {one}"
    available = available_memory_bytes()
    if wanted > available:
        return mover, 0, f"kv_host_bytes is {wanted}, and the machine has {available} bytes available"
    try:
        return SlabMover(pool, wanted // one), wanted // one, ""
    except RuntimeError as error:
        return mover, 0, f"{wanted} bytes cannot be had: {str(error).splitlines()[0]}"


def _open_disk(settings: EngineSettings, block_bytes: int) -> tuple[SlotFile | None, int, str]:
    """Make the file; returns its blocks and what stands in the way."""
    wanted, one = settings.kv_disk_bytes, slot_bytes(block_bytes)
    if not wanted:
        return None, 0, ""
    if settings.kv_disk_dir is None:
        return None, 0, "no folder was given for kv_disk_bytes"
    if wanted < one:
        return None, 0, f"kv_disk_bytes is {wanted}, and one block takes {one}"
    slots = wanted // one
    name = settings.replica_id or "replica"
    try:
        file = SlotFile(settings.kv_disk_dir, name, slots=slots, block_bytes=block_bytes)
    except OSError as error:
        return None, 0, str(error)
    return file, slots, ""


def available_memory_bytes() -> int:
    """What the machine could still give, as the kernel estimates it; all it has where it does not say."""
    try:
        with _MEMORY_FACTS.open(encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
