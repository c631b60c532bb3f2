"""Whether the accelerators of a launch are there, and their memory is really free. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from workers.agent.facts import Held
from workers.protocol.hardware import AcceleratorInfo
from workers.protocol.observed import UnknownProcess
from workers.protocol.wish import ReplicaSpec

_MIB = 1 << 20


def find_held(
    spec: ReplicaSpec, accelerators: Iterable[AcceleratorInfo], foreign: Iterable[UnknownProcess]
) -> Held | None:
    """Return who holds memory that the replica was promised; `None` where it is free or not known.

    What the replicas of this node use is planned for; what others use is not.
    """
    sizes = {a.uuid: a.memory_bytes for a in accelerators}
    wanted = [uuid for uuid in spec.accelerator_uuids if uuid in sizes]
    if not wanted:
        return None
    each = -(-spec.memory_bytes // len(spec.accelerator_uuids))
    foreign = tuple(foreign)
    for uuid in wanted:
        there = [p for p in foreign if p.accelerator_uuid == uuid]
        held = sum(p.memory_bytes for p in there)
        if there and sizes[uuid] - held < each:
            pids = tuple(sorted(p.pid for p in there))
            return Held(pids, _text(uuid, pids, held, each))
    return None


def find_unseen(spec: ReplicaSpec, accelerators: Iterable[AcceleratorInfo], *, complete: bool) -> Held | None:
    """Return what a launch waits for while accelerators of its cannot be seen; `None`: nothing, or for ever.

    `complete`: every vendor's tool has answered, so what is not seen is not there, and waiting helps nobody.
    """
    here = {a.uuid for a in accelerators}
    unseen = [uuid for uuid in spec.accelerator_uuids if uuid not in here]
    if complete or not unseen:
        return None
    return Held((), f"waiting for accelerator {unseen[0]}: the vendor's tool does not answer")


def _text(uuid: str, pids: tuple[int, ...], held: int, needed: int) -> str:
    shown = ", ".join(map(str, pids[:4]))
    return (
        f"waiting for memory: {needed // _MIB} MiB of {uuid} are needed, "
        f"{held // _MIB} MiB are held by pid {shown}"
    )
