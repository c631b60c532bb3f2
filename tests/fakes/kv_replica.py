"""A replica that really leases, allocates and schedules, and whose 'model' writes tokens into the blocks.

Each computed token is written to its place in its block, and each step reads back all that a model
would attend to. A block that was moved wrongly, lent twice or not wiped shows as a wrong token.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from pathlib import Path

from tests.fakes.kv_tenant import LAYOUT
from workers.engines.kv_blocks import BlockAllocator
from workers.engines.torch_engine.kv_room import PooledRoom
from workers.engines.torch_engine.scheduler import Chunk, Scheduler, SchedulerLimits, Sequence
from workers.kv.arena import CpuArena
from workers.kv.lease import Terms, join

_TOKEN_BYTES = 4


class WritingReplica:
    """One replica in this process."""

    def __init__(
        self,
        folder: Path,
        replica_id: str,
        terms: Terms,
        *,
        clock: Callable[[], float],
        limits: SchedulerLimits | None = None,
    ) -> None:
        self.member = join(folder, LAYOUT, replica_id, 1, terms)
        self.allocator = BlockAllocator(extent_blocks=self.member.extent_blocks)
        assert isinstance(self.member.arena, CpuArena)
        self._address = self.member.arena.address
        room = PooledRoom(self.member, self.allocator, self.copy, clock=clock)
        limits = limits or SchedulerLimits(8, 128)
        self.scheduler = Scheduler(self.allocator, limits, salt=replica_id.encode(), room=room)
        self.goals: dict[str, int] = {}
        """Open requests and the length that each is to reach."""
        self.sequences: dict[str, Sequence] = {}
        self.preempted = 0
        self.moved = 0
        self.cached_tokens = 0

    def add(self, request_id: str, prompt: list[int], length: int) -> None:
        """Queue a request that is done at `length` tokens."""
        sequence = Sequence(request_id, list(prompt))
        self.goals[request_id] = max(length, len(prompt) + 1)
        self.sequences[request_id] = sequence
        self.scheduler.add(sequence)

    def step(self) -> bool:
        """Do one step; true if something was computed."""
        plan = self.scheduler.plan_step()
        self.preempted += len(plan.preempted)
        self.cached_tokens += sum(a.cached_tokens for a in plan.admissions)
        for chunk in plan.chunks:
            self._compute(chunk)
        self.scheduler.complete(plan)
        for chunk in plan.chunks:
            if chunk.samples:
                self._sample(chunk.sequence)
        return bool(plan.chunks)

    def copy(self, source: int, target: int) -> None:
        """Copy a block."""
        self.moved += 1
        ctypes.memmove(self._at(target, 0), self._at(source, 0), LAYOUT.block_bytes)

    def close(self) -> None:
        """End, as a process would."""
        self.member.close()

    def _compute(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        for place in range(chunk.start, chunk.end):
            ctypes.memmove(self._place(sequence, place), sequence.tokens[place].to_bytes(4, "little"), 4)
        blocks = sequence.blocks[: -(-chunk.end // LAYOUT.block_tokens)]
        width = _TOKEN_BYTES * LAYOUT.block_tokens
        seen = array("I", b"".join(ctypes.string_at(self._at(block, 0), width) for block in blocks)).tolist()
        assert seen[: chunk.end] == sequence.tokens[: chunk.end], (
            f"{sequence.request_id} would attend to foreign tokens"
        )

    def _sample(self, sequence: Sequence) -> None:
        sequence.tokens.append(len(sequence.tokens) * 7 + 1)
        if len(sequence.tokens) >= self.goals[sequence.request_id]:
            self.scheduler.remove(sequence)
            del self.goals[sequence.request_id], self.sequences[sequence.request_id]

    def _place(self, sequence: Sequence, at: int) -> int:
        return self._at(sequence.blocks[at // LAYOUT.block_tokens], at % LAYOUT.block_tokens)

    def _at(self, block: int, place: int) -> int:
        return self._address + block * LAYOUT.block_bytes + place * _TOKEN_BYTES
