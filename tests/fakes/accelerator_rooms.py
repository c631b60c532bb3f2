"""Rooms for replicas, as placement sees them."""

from __future__ import annotations

from dataclasses import replace

from exaserve_ops.serving.domain.placement import (
    AcceleratorRoom,
    NodeRoom,
)
from exaserve_ops.serving.domain.reservation import margin_bytes

MIB = 1 << 20
GIB = 1 << 30


def card(uuid: str, gib: int = 80, kind: str = "cuda", **changes: object) -> AcceleratorRoom:
    """A whole accelerator with nothing on it."""
    room = AcceleratorRoom(uuid, kind, gib * GIB, 0, margin_bytes=margin_bytes(gib * GIB))
    return replace(room, **changes)  # type: ignore[arg-type]  # fields of the room


def part(uuid: str, profile: str, parent: str = "GPU-0", *, replicas: int = 0) -> AcceleratorRoom:
    """A slice of a card."""
    gib = int(profile.partition(".")[2][:-2])
    return card(uuid, gib, parent_uuid=parent, profile=profile, replicas=replicas)


def node(name: str, *accelerators: AcceleratorRoom, rack: str = "", mps: str = "") -> NodeRoom:
    """A node with these accelerators."""
    return NodeRoom(
        f"id-{name}",
        name,
        accepts=True,
        refusal="",
        engines=frozenset({"torch"}),
        rack=rack,
        accelerators=accelerators,
        same_deployment=0,
        replicas=0,
        mps_problem=mps,
    )
