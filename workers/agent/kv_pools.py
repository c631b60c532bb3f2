"""The agent's care for the node's pools of KV blocks: reclaim, remove, limit, tell."""

from __future__ import annotations

import logging
from collections.abc import Set
from pathlib import Path

from workers.kv.pool import NodePools, PoolStatus
from workers.kv.table import TableError

_SWEEP_SECONDS = 1.0
_CHECK_SECONDS = 60.0

logger = logging.getLogger(__name__)


class KvPoolKeeper:
    """Looks after this node's pools. It keeps nothing of its own: all is in the pools' tables."""

    def __init__(self, folder: Path) -> None:
        """Look after the pools below `folder`, which need not be there yet."""
        self.folder = folder
        self._pools = NodePools(folder)
        self._swept_at = float("-inf")
        self._checked_at = float("-inf")
        self._error = ""
        self.reclaimed_extents = 0
        """Taken from dead replicas by this agent."""

    def tend(self, wanted: Set[str], *, now: float) -> None:
        """Reclaim what dead replicas held and remove pools that nobody uses, once a second at most.

        `wanted` are the replicas that are to be on this node: their place in a pool is kept.
        """
        if now - self._swept_at < _SWEEP_SECONDS:
            return
        self._swept_at = now
        check = now - self._checked_at >= _CHECK_SECONDS
        try:
            taken = self._pools.sweep(wanted, check_records=check)
        except (OSError, TableError) as error:
            if str(error) != self._error:  # each second would say the same again
                logger.warning("KV pools in %s: %s", self.folder, error)
            self._error = str(error)
            return
        self._error = ""
        if check:
            self._checked_at = now
        if taken:
            self.reclaimed_extents += taken
            logger.info("reclaimed %d extents of KV blocks from dead replicas", taken)

    def set_limits(self, replica_id: str, minimum_blocks: int, ceiling_blocks: int) -> None:
        """Change a running replica's limits. Raises `PoolJoinError`, `LookupError` or `TableError`."""
        self._pools.set_limits(replica_id, minimum_blocks, ceiling_blocks)

    def pool_status(self) -> tuple[PoolStatus, ...]:
        """Return how each pool is used now, for heartbeats. Raises `OSError` or `TableError`."""
        return self._pools.status()
