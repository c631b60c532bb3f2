"""Whether a launch may begin: it waits for memory that is seen to be free, for so long and no longer.

What is looked at is never older than the launch's own wish to begin, so what ended just before is not taken
for gone. Where nothing can be seen nothing is waited for, and the launch says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import psutil

from workers.agent.facts import Held
from workers.agent.foreign import MemoryLook
from workers.agent.memory import (
    Room,
    Shortage,
    Tenant,
    claim_bytes,
    describe,
    find_shortage,
    tenant_of,
)
from workers.probes.limits import read_limits, usable_memory_bytes
from workers.protocol.hardware import AcceleratorInfo
from workers.protocol.wish import ReplicaSpec, WantedState

HOST = "host"
_FRESH_SECONDS = 3.0
_STALE_SECONDS = 10.0
"""A wait that lasts is looked at less often."""
_ANSWER_SECONDS = 30.0
"""Longer than a vendor's tool is given: then its silence counts as not knowing."""
_PERIOD_SECONDS = 5.0
"""A replica that was not asked about for so long has been launched, or is not wanted, meanwhile."""

logger = logging.getLogger(__name__)


class MemorySource(Protocol):
    """Whoever looks at the memory of cards."""

    @property
    def memory(self) -> MemoryLook:
        """The last look."""
        ...

    def ask_memory(self) -> None:
        """Have another one soon."""
        ...


@dataclass(frozen=True, slots=True)
class OnNode:
    """What the node is made of, and what runs on it."""

    accelerators: Sequence[AcceleratorInfo]
    running: Sequence[tuple[ReplicaSpec, bool]]
    """Wishes of replicas with an attempt that goes on, and whether it is ready."""
    sharing: Collection[str] = frozenset()
    """Accelerators whose replicas share their memory."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the machine, or of the control group that bounds this agent."""

    total_bytes: int
    available_bytes: int


def read_host_memory() -> HostMemory | None:
    """What the machine has left, or the control group's wall if that is nearer."""
    memory, limits = psutil.virtual_memory(), read_limits()
    total, available = usable_memory_bytes(limits), memory.available
    if limits.memory_bytes is not None and limits.memory_used_bytes is not None:
        available = min(available, limits.memory_bytes - limits.memory_used_bytes)
    return HostMemory(total, max(0, available)) if total > 0 else None


@dataclass(slots=True)
class _Pending:
    since: float
    called_at: float
    short_since: float | None = None
    said: str = ""


@dataclass(slots=True)
class MemoryGate:
    """One node's. For the thread of the reconcile loop."""

    source: MemorySource
    on_node: Callable[[], OnNode]
    at_most_seconds: float
    host: Callable[[], HostMemory | None] = read_host_memory
    clock: Callable[[], float] = time.monotonic
    notes: dict[str, str] = field(default_factory=dict)
    """By replica id: why one is launched though its memory was not seen to be free."""
    _pending: dict[str, _Pending] = field(default_factory=dict)

    def held(self, spec: ReplicaSpec) -> Held | None:
        """Return what a launch waits for, or `None` if it may begin."""
        if spec.wanted is not WantedState.RUN or claim_bytes(spec) <= 0:
            return None
        now = self.clock()
        pending = self._pending.get(spec.replica_id)
        if pending is None or now - pending.called_at > _PERIOD_SECONDS:
            pending = self._pending[spec.replica_id] = _Pending(now, now)
        pending.called_at = now
        self.notes.pop(spec.replica_id, None)
        node = self.on_node()
        cards = {a.uuid for a in node.accelerators if a.kind != "cpu"} & set(spec.accelerator_uuids)
        if not cards:
            return self._judge(spec, pending, self._host_shortage(spec, node), now)
        return self._of_cards(spec, pending, node, now)

    def _of_cards(self, spec: ReplicaSpec, pending: _Pending, node: OnNode, now: float) -> Held | None:
        look = self.source.memory
        waited = now - (pending.since if pending.short_since is None else pending.short_since)
        fresh_seconds = max(_FRESH_SECONDS, min(_STALE_SECONDS, waited / 6))
        if look.began_at_seconds < pending.since or now - look.began_at_seconds > fresh_seconds:
            self.source.ask_memory()
        if look.began_at_seconds < pending.since or now - look.began_at_seconds > _ANSWER_SECONDS:
            if now - max(pending.since, look.began_at_seconds) <= _ANSWER_SECONDS:
                return Held((), "its accelerator's memory is looked at before it is launched")
            self._say(spec, pending, "the memory of its accelerators cannot be seen: no answer in time")
            return None
        unseen = [uuid for uuid in spec.accelerator_uuids if uuid not in look.cards]
        if unseen:
            self._say(
                spec, pending, f"the memory of {unseen[0]} cannot be seen: the vendor's tool does not say"
            )
        rooms = (_room(uuid, look, node) for uuid in spec.accelerator_uuids if uuid in look.cards)
        shortages = (find_shortage(spec, room) for room in rooms)
        return self._judge(spec, pending, next((s for s in shortages if s is not None), None), now)

    def _host_shortage(self, spec: ReplicaSpec, node: OnNode) -> Shortage | None:
        host = self.host()
        if host is None:
            return None
        used = max(0, host.total_bytes - host.available_bytes)
        # Nobody is named there, and what starts takes its memory bit by bit: what is free now counts.
        return find_shortage(
            spec, Room(HOST, host.total_bytes, used, _tenants(node), shares=True, named=False)
        )

    def _judge(
        self, spec: ReplicaSpec, pending: _Pending, shortage: Shortage | None, now: float
    ) -> Held | None:
        if shortage is None:
            pending.short_since = None
            return None
        if pending.short_since is None:
            pending.short_since = now
        waited = now - pending.short_since
        text = describe(shortage.wait)
        if not shortage.stranger_pids and waited >= self.at_most_seconds:
            self._say(spec, pending, f"launched after {waited:.0f} s all the same, {text}")
            return None
        at_most = None if shortage.stranger_pids else self.at_most_seconds
        wait = msgspec.structs.replace(shortage.wait, waited_seconds=waited, at_most_seconds=at_most)
        return Held(shortage.stranger_pids, text, wait)

    def _say(self, spec: ReplicaSpec, pending: _Pending, note: str) -> None:
        self.notes[spec.replica_id] = note
        if note != pending.said:
            logger.warning("event=memory_not_seen_free replica=%s %s", spec.replica_id, note)
        pending.said = note


def _room(uuid: str, look: MemoryLook, node: OnNode) -> Room:
    card = look.cards[uuid]
    return Room(
        name=uuid,
        total_bytes=card.total_bytes,
        used_bytes=card.used_bytes,
        tenants=_tenants(node, uuid),
        occupants=tuple(o for o in look.occupants if o.accelerator_uuid == uuid),
        shares=uuid in node.sharing,
    )


def _tenants(node: OnNode, uuid: str = "") -> tuple[Tenant, ...]:
    running = (pair for pair in node.running if not uuid or uuid in pair[0].accelerator_uuids)
    return tuple(tenant_of(spec, ready=ready) for spec, ready in running)
