"""Whether the accelerators of a launch are there, and whether their memory is free as it is seen now. Pure.

What replicas of this node are promised is planned for by the control plane; what is looked for here is what
no plan knows: memory of strangers, of replicas that are still ending, and of processes that have ended and
whose memory the driver has yet to give back. What cannot be observed is not waited for.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workers.agent.facts import Held
from workers.protocol.hardware import AcceleratorInfo
from workers.protocol.observed import MemoryHolder, MemoryWait
from workers.protocol.wish import ReplicaSpec

_GIB = 1 << 30
_MARGIN_RATIO = 0.02
"""Of an accelerator: what placement leaves for contexts and for what nobody counts."""
_MOST_HOLDERS = 8
_WORTH_NAMING_BYTES = 64 << 20


class Whose(enum.Enum):
    """To whom a process on an accelerator belongs."""

    STRANGER = "stranger"
    REPLICA = "replica"
    HOLDER = "holder"
    """Ours: it holds what replicas of the accelerator share."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """A process that holds memory of an accelerator. `memory_bytes` is `None` where the tool did not say."""

    accelerator_uuid: str
    pid: int
    memory_bytes: int | None
    whose: Whose
    replica_id: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A replica with an open attempt that stays where it is."""

    replica_id: str
    claim_bytes: int
    """Of each of its accelerators."""
    weights_bytes: int
    """Of these, what replicas with the same weights may hold together."""
    model_digest: str
    ready: bool


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of one accelerator as it was seen, and who uses it."""

    name: str
    total_bytes: int
    used_bytes: int
    tenants: tuple[Tenant, ...] = ()
    occupants: tuple[Occupant, ...] = ()
    shares: bool = False
    """Its replicas hold the same weights once, and KV memory together."""
    named: bool = True
    """Its users are named, as far as they are processes."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A launch does not fit into what is free now."""

    wait: MemoryWait
    stranger_pids: tuple[int, ...] = ()
    """Set where it would not fit even when all that is ours and ends is gone: strangers keep it out."""


def find_unseen(spec: ReplicaSpec, accelerators: Iterable[AcceleratorInfo], *, complete: bool) -> Held | None:
    """Return what a launch waits for while accelerators of its cannot be seen; `None`: nothing, or for ever.

    `complete`: every vendor's tool has answered, so what is not seen is not there, and waiting helps nobody.
    """
    here = {a.uuid for a in accelerators}
    unseen = [uuid for uuid in spec.accelerator_uuids if uuid not in here]
    if complete or not unseen:
        return None
    return Held((), f"waiting for accelerator {unseen[0]}: the vendor's tool does not answer")


def claim_bytes(spec: ReplicaSpec) -> int:
    """What a replica is promised of each of its accelerators."""
    return -(-spec.memory_bytes // max(1, len(spec.accelerator_uuids)))


def tenant_of(spec: ReplicaSpec, *, ready: bool) -> Tenant:
    """A replica that runs by this wish."""
    weights = sum(file.size_bytes for file in spec.model.files if file.path.endswith(".safetensors"))
    share = weights // max(1, len(spec.accelerator_uuids))
    claim = claim_bytes(spec)
    return Tenant(spec.replica_id, claim, min(claim, share), spec.model.digest, ready)


def find_shortage(spec: ReplicaSpec, room: Room) -> Shortage | None:
    """Return what keeps a launch from the memory that it was promised; `None` where it fits."""
    need = _need_bytes(tenant_of(spec, ready=False), room)
    ours = _ours_bytes(room)
    free = room.total_bytes - room.used_bytes - ours
    margin = int(_MARGIN_RATIO * room.total_bytes)
    if need <= free + margin:
        return None
    staying = {tenant.replica_id for tenant in room.tenants}
    strangers = [o for o in room.occupants if o.whose is Whose.STRANGER]
    leaving = [o for o in room.occupants if o.whose is Whose.REPLICA and o.replica_id not in staying]
    going = _sum(leaving) + _unnamed_bytes(room)
    kept_out = bool(strangers) and need > free + margin + going
    wait = MemoryWait(
        place=room.name,
        needed_bytes=need,
        free_bytes=max(0, free),
        total_bytes=room.total_bytes,
        holders=_holders(room, strangers, leaving),
    )
    pids = tuple(sorted({o.pid for o in strangers})) if kept_out else ()
    return Shortage(wait, pids)


def describe(wait: MemoryWait) -> str:
    """Say a wait in one sentence with its figures."""
    text = (
        f"waiting for memory of {wait.place}: {_gib(wait.needed_bytes)} are needed, "
        f"{_gib(wait.free_bytes)} of {_gib(wait.total_bytes)} are free"
    )
    held = ", ".join(_of_holder(holder) for holder in wait.holders)
    return f"{text}; {held}" if held else text


def _need_bytes(launch: Tenant, room: Room) -> int:
    """What a launch takes of what is free: weights that are there already it takes from nobody."""
    there = room.shares and any(t.model_digest == launch.model_digest for t in room.tenants)
    return launch.claim_bytes - (launch.weights_bytes if there else 0)


def _ours_bytes(room: Room) -> int:
    """What of the free memory is spoken for by replicas that still start.

    Negative where our own holder has more than they are promised: that is lent and comes back on demand.
    """
    starting = [tenant for tenant in room.tenants if not tenant.ready]
    if room.shares:
        return _shared_balance_bytes(room, starting)
    growing = sum(max(0, t.claim_bytes - _footprint_bytes(room, t)) for t in starting)
    # Where a container's tool names no process, what they took already is in use by nobody.
    return max(0, growing - _unnamed_bytes(room)) if growing else 0


def _shared_balance_bytes(room: Room, starting: Sequence[Tenant]) -> int:
    promised = _together_bytes(room.tenants)
    holders = [o for o in room.occupants if o.whose is Whose.HOLDER]
    if not holders or any(o.memory_bytes is None for o in holders):
        return 0
    held = _sum(holders) + sum(_footprint_bytes(room, tenant) for tenant in room.tenants)
    return min(promised - held, _together_bytes(starting))


def _together_bytes(tenants: Iterable[Tenant]) -> int:
    """Claims of replicas that hold the same weights once."""
    seen: set[str] = set()
    total = 0
    for tenant in tenants:
        total += tenant.claim_bytes - (tenant.weights_bytes if tenant.model_digest in seen else 0)
        seen.add(tenant.model_digest)
    return total


def _footprint_bytes(room: Room, tenant: Tenant) -> int:
    """What a replica's processes hold; what the tool does not size is taken for all that it is promised."""
    its_own = [o for o in room.occupants if o.replica_id == tenant.replica_id and o.whose is Whose.REPLICA]
    if any(o.memory_bytes is None for o in its_own):
        return tenant.claim_bytes
    return _sum(its_own)


def _unnamed_bytes(room: Room) -> int:
    """In use, and by no process that is named: the driver has yet to give it back, or keeps it itself."""
    return max(0, room.used_bytes - _sum(room.occupants)) if room.named else 0


def _sum(occupants: Iterable[Occupant]) -> int:
    return sum(o.memory_bytes or 0 for o in occupants)


def _holders(
    room: Room, strangers: Sequence[Occupant], leaving: Sequence[Occupant]
) -> tuple[MemoryHolder, ...]:
    """Who is in the way, the largest first."""
    found = [
        MemoryHolder(kind="stranger", pid=o.pid, command=o.command, memory_bytes=o.memory_bytes)
        for o in strangers
    ]
    found += [
        MemoryHolder(kind="leaving", pid=o.pid, replica_id=o.replica_id, memory_bytes=o.memory_bytes)
        for o in leaving
    ]
    found += [
        MemoryHolder(kind="running", replica_id=t.replica_id, memory_bytes=_footprint_bytes(room, t))
        for t in room.tenants
        if _footprint_bytes(room, t) > t.claim_bytes + _WORTH_NAMING_BYTES
    ]
    if _unnamed_bytes(room) > _WORTH_NAMING_BYTES:
        found.append(MemoryHolder(kind="unnamed", memory_bytes=_unnamed_bytes(room)))
    found.sort(key=lambda holder: -(holder.memory_bytes or 0))
    return tuple(found[:_MOST_HOLDERS])


def _of_holder(holder: MemoryHolder) -> str:
    size = "an unknown part" if holder.memory_bytes is None else _gib(holder.memory_bytes)
    match holder.kind:
        case "stranger":
            who = f"pid {holder.pid} ({holder.command or 'unknown'}, not ours)"
        case "leaving":
            who = f"replica {holder.replica_id} (pid {holder.pid}), which is ending"
        case "running":
            who = f"replica {holder.replica_id}, more than it is promised"
        case _:
            who = "no process that is named: not yet given back"
    return f"{size} held by {who}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
