"""The agent's care for the node's pools of KV blocks: reclaim, remove, limit, tell."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from pathlib import Path

from workers.kv.hoards import AttemptKey, Hoard, follow_hoards
from workers.kv.ledger import PoolJoinError
from workers.kv.pool import MemberStatus, NodePools, PoolStatus
from workers.kv.table import TableError
from workers.kv.tiers.slot_file import remove_dead_files
from workers.protocol import v1
from workers.protocol.digests import KV_BLOCK_TOKENS
from workers.protocol.kv_pools import KvPool, KvPoolMember, pack_map

_SWEEP_SECONDS = 1.0
_CHECK_SECONDS = 60.0
_LONGEST_LOOK_SECONDS = 2.0
"""Between two looks no more than this counts: an agent that stood still has seen nothing."""
_LOOK_SPACING = 20.0
"""A look at the pools costs more where they are large, and is made so many times its cost apart."""

logger = logging.getLogger(__name__)


class KvPoolKeeper:
    """Looks after this node's pools. It keeps nothing of its own: all is in the pools' tables."""

    def __init__(self, folder: Path, disk_folder: Path | None = None) -> None:
        """Look after the pools below `folder`, and replicas' blocks on disk; neither need be there yet."""
        self.folder = folder
        self.disk_folder = disk_folder
        self._pools = NodePools(folder)
        self._swept_at = float("-inf")
        self._checked_at = float("-inf")
        self._error = ""
        self._facts: tuple[KvPool, ...] = ()
        self._facts_due = float("-inf")
        self._hoards: dict[AttemptKey, Hoard] = {}
        self.reclaimed_extents = 0
        """Taken from dead replicas by this agent."""

    def tend(self, wanted: Set[str], *, now: float) -> None:
        """Reclaim what dead replicas held and remove pools that nobody uses, once a second at most.

        `wanted` are the replicas that are to be on this node: their place in a pool is kept.
        """
        if now - self._swept_at < _SWEEP_SECONDS:
            return
        passed = min(now - self._swept_at, _LONGEST_LOOK_SECONDS)
        self._swept_at = now
        check = now - self._checked_at >= _CHECK_SECONDS
        try:
            taken = self._pools.sweep(wanted, check_records=check)
            self._hoards = follow_hoards(self._hoards, self._pools.debts(), passed_seconds=passed)
        except (OSError, TableError) as error:
            if str(error) != self._error:  # each second would say the same again
                logger.warning("KV pools in %s: %s", self.folder, error)
            self._error = str(error)
            return
        self._error = ""
        if check:
            self._checked_at = now
            self._clear_disk()
        if taken:
            self.reclaimed_extents += taken
            logger.info("reclaimed %d extents of KV blocks from dead replicas", taken)

    def _clear_disk(self) -> None:
        """Give back the disk's room that dead replicas kept blocks in."""
        try:
            if self.disk_folder is not None:
                remove_dead_files(self.disk_folder)
        except OSError as error:
            logger.warning("files of dead replicas in %s stay: %s", self.disk_folder, error)

    def hoarding_seconds(self, key: AttemptKey) -> float:
        """For how long an attempt has kept all of what others are guaranteed and wait for; 0: it has not."""
        hoard = self._hoards.get(key)
        return hoard.seconds if hoard is not None else 0.0

    def set_limits(self, replica_id: str, minimum_blocks: int, ceiling_blocks: int) -> None:
        """Change a running replica's limits. Raises `PoolJoinError`, `LookupError` or `TableError`."""
        self._pools.set_limits(replica_id, minimum_blocks, ceiling_blocks)

    def take_limits(self, command: v1.SetKvLimits) -> str:
        """Carry a command out; returns why not, or nothing."""
        if not 0 < command.minimum_blocks <= command.ceiling_blocks:
            return (
                f"a minimum of {command.minimum_blocks} and a ceiling of {command.ceiling_blocks} blocks"
                " cannot both hold"
            )
        try:
            self.set_limits(command.replica_id, command.minimum_blocks, command.ceiling_blocks)
        except LookupError as error:
            return str(error.args[0])
        except (PoolJoinError, TableError, OSError) as error:
            return str(error)
        return ""

    def pool_status(self) -> tuple[PoolStatus, ...]:
        """Return how each pool is used now. Raises `OSError` or `TableError`."""
        return self._pools.status()

    def facts(self, *, clock: Callable[[], float] = time.monotonic) -> tuple[KvPool, ...]:
        """Return what heartbeats say of the pools; those of before where they cannot be read now."""
        began = clock()
        if began < self._facts_due:
            return self._facts
        try:
            self._facts = tuple(_pool(status) for status in self._pools.status())
        except (OSError, TableError) as error:  # a pool that is made or removed at this moment
            logger.debug("KV pools in %s cannot be read now: %s", self.folder, error)
        self._facts_due = clock() + _LOOK_SPACING * (clock() - began)
        return self._facts


def _pool(status: PoolStatus) -> KvPool:
    return KvPool(
        pool_id=status.pool_id,
        block_tokens=KV_BLOCK_TOKENS,
        block_bytes=status.block_bytes,
        extent_blocks=status.extent_blocks,
        capacity_blocks=status.capacity_blocks,
        free_blocks=status.free_blocks,
        damaged_blocks=status.damaged_extents * status.extent_blocks,
        fragmentation_ratio=round(status.fragmentation_ratio, 4),
        reclaimed_extents=status.reclaimed_extents,
        members=tuple(_member(row) for row in status.members),
        cell_extents=status.cell_extents,
        map=pack_map(status.cells),
    )


def _member(row: MemberStatus) -> KvPoolMember:
    return KvPoolMember(
        replica_id=row.replica_id,
        attempt=row.attempt,
        alive=row.alive,
        leased_blocks=row.leased_blocks,
        guaranteed_blocks=row.guaranteed_blocks,
        ceiling_blocks=row.ceiling_blocks,
        brought_blocks=row.brought_blocks,
        live_blocks=row.live_blocks,
        cached_blocks=row.cached_blocks,
        asked_back_blocks=row.asked_back_blocks,
        waiting_requests=row.waiting_requests,
        short_blocks=row.short_blocks,
        preempted_requests=row.preempted_requests,
        returned_extents=row.returned_extents,
        cached_by_age_blocks=row.cached_by_age_blocks,
    )
