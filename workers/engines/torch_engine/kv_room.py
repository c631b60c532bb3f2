"""Where the scheduler's blocks come from: memory of its own, or leases on the node's pool."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from workers.engines.kv_blocks import BlockAllocator, CopyBlock
from workers.kv.lease import PoolMember, Use
from workers.kv.sharing import idle_surplus
from workers.kv.table import PoolBusyError

_TELL_SECONDS = 0.1
_TEND_SECONDS = 0.2
_MARK_SECONDS = 0.5
_IDLE_SECONDS = 2.0
"""Extents that were not needed for so long are returned."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the scheduler needs beside the blocks that its sequences hold already."""

    more_blocks: int = 0
    """For running sequences to go on and for waiting ones to start."""
    waiting: int = 0
    """Requests that queue."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What came of settling with the node's pool."""

    moves: Mapping[int, int] = field(default_factory=dict)
    """Old to new block numbers, which every sequence must follow before anything else."""
    owed_extents: int = 0
    """Still to be given back: nothing new may start before that."""
    preempt_extents: int = 0
    """Part of it for which sequences must be set back."""


class KvRoom(Protocol):
    """Source of extents for one allocator."""

    tend_seconds: float | None
    """How often `settle` is to be called while nothing is computed; `None`: never."""

    @property
    def is_owed(self) -> bool:
        """Whether less is held than is guaranteed: what is missing then comes within a few steps."""
        ...

    def secure(self, blocks: int) -> None:
        """Try to have so many blocks free without evicting anything; falling short is no error."""
        ...

    def settle(self, demand: Demand, *, preempted: int = 0) -> Settlement:
        """Give back what is asked for, before each step. Raises `LeaseLostError`."""
        ...


class PrivateRoom:
    """Memory of this process alone: never more, never less."""

    tend_seconds: float | None = None
    is_owed: bool = False

    def secure(self, blocks: int) -> None:
        """Nothing can be had."""

    def settle(self, demand: Demand, *, preempted: int = 0) -> Settlement:  # noqa: ARG002 - a port
        """Nothing is owed."""
        return Settlement()


class PooledRoom:
    """Leases on a node's pool, taken when needed, given back when asked for or long unused."""

    tend_seconds: float | None = _TEND_SECONDS

    def __init__(
        self,
        member: PoolMember,
        allocator: BlockAllocator,
        copy: CopyBlock,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lease for `allocator`; `copy` moves a block's content."""
        self._member = member
        self._allocator = allocator
        self._copy = copy
        self._clock = clock
        self._demand = Demand()
        self._refused = False
        self._told_at = float("-inf")
        self._marked_at = float("-inf")
        self._told = Use()
        self._peaks: deque[tuple[float, int]] = deque()
        """(when, extents in use), falling in use: the front one is the most of late."""
        allocator.obtainable_blocks = member.reach_blocks()

    @property
    def is_owed(self) -> bool:
        """Whether less is held than is guaranteed, and the pool has just refused more."""
        return self._refused and self._allocator.total_blocks < self._member.guaranteed_blocks

    def secure(self, blocks: int) -> None:
        """Ask the pool for what is missing; once refused, not again before the next step."""
        missing = blocks - self._allocator.free
        if missing <= 0 or self._refused:
            return
        asked = -(-missing // self._allocator.extent_blocks)
        self._told = self._use()
        numbers = self._member.take(asked, self._told)
        self._allocator.add_extents(numbers)
        self._refused = len(numbers) < asked
        self._allocator.obtainable_blocks = self._member.reach_blocks()

    def settle(self, demand: Demand, *, preempted: int = 0) -> Settlement:
        """Check the leases, say what is needed, return what is asked for. Raises `LeaseLostError`."""
        self._member.check()
        self._refused = False
        self._demand = demand
        now = self._clock()
        self._allocator.now_seconds = now
        asked = self._member.recall()
        self._note_peak(now)
        moves: Mapping[int, int] = {}
        if asked.give_back:
            moves = self._return(asked.give_back, only_empty=False, preempted=preempted)
            asked = self._member.recall()
        elif preempted or now - self._told_at >= _TELL_SECONDS or self._needs_other_extents():
            self._return(self._surplus(), only_empty=True, preempted=preempted)
            self._told_at = now
            asked = self._member.recall()
        if now - self._marked_at >= _MARK_SECONDS:
            self._member.mark(self._allocator.extent_facts())
            self._marked_at = now
        return Settlement(moves, asked.give_back, asked.preempt)

    def _return(self, extents: int, *, only_empty: bool, preempted: int) -> Mapping[int, int]:
        """Vacate and return extents, and tell the use; returns where live blocks went."""
        vacated = self._allocator.vacate(extents, self._copy, only_empty=only_empty)
        use = self._use(preempted)
        if not vacated.extents:
            if use != self._told:
                self._member.tell(use)
        else:
            try:
                self._member.give(vacated.extents, use)
            except PoolBusyError:
                # They are empty and still ours: used again, and returned at a later step.
                self._allocator.add_extents(vacated.extents)
        self._told = use
        self._allocator.obtainable_blocks = self._member.reach_blocks()
        return vacated.moves

    def _use(self, preempted: int = 0) -> Use:
        use = self._allocator.use()
        return Use(
            live=use.used,
            cached=use.cached,
            needed=use.used + self._demand.more_blocks,
            waiting=self._demand.waiting,
            preempted=preempted,
        )

    def _needs_other_extents(self) -> bool:
        """Whether the need is another number of extents now: said at once, so that room comes in time."""
        size = self._allocator.extent_blocks
        return -(-self._use().needed // size) != -(-self._told.needed // size)

    def _note_peak(self, now: float) -> None:
        in_use = self._allocator.extents_in_use
        while self._peaks and self._peaks[-1][1] <= in_use:
            self._peaks.pop()
        self._peaks.append((now, in_use))
        while self._peaks[0][0] < now - _IDLE_SECONDS:
            self._peaks.popleft()

    def _surplus(self) -> int:
        """Extents that were empty for a while, beyond the guaranteed ones."""
        return idle_surplus(
            leased=len(self._member.extents),
            minimum=self._member.guaranteed_blocks // self._allocator.extent_blocks,
            recent_peak=self._peaks[0][1],
        )
