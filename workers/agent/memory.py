"""Whether the memory that a launch needs is really free: what else sits on its accelerators. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from workers.agent.facts import Held
from workers.protocol.v1 import AcceleratorInfo, ReplicaSpec, UnknownProcess

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


def _text(uuid: str, pids: tuple[int, ...], held: int, needed: int) -> str:
    shown = ", ".join(map(str, pids[:4]))
    return (
        f"waiting for memory: {needed // _MIB} MiB of {uuid} are needed, "
        f"{held // _MIB} MiB are held by pid {shown}"
    )
