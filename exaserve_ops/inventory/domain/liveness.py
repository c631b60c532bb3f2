"""Liveness of a node: derived by the failure detector, never set by a person."""

from __future__ import annotations

from exaserve_ops.lib.lifecycle import Lifecycle, table

JOINING = "joining"
ALIVE = "alive"
SUSPECT = "suspect"
DEAD = "dead"

NODE_LIVENESS = Lifecycle(
    name="node",
    initial=JOINING,
    statuses=(JOINING, ALIVE, SUSPECT, DEAD),
    final=frozenset(),
    transitions=table(
        [
            ("reported", [JOINING, SUSPECT], ALIVE),
            ("missed", [ALIVE], SUSPECT),
            ("lost", [ALIVE, SUSPECT], DEAD),
            ("recovered", [DEAD], ALIVE),
        ]
    ),
    meanings={
        JOINING: "Enrolled; its agent has not reported yet.",
        ALIVE: "Heartbeats arrive.",
        SUSPECT: "At least one heartbeat in a row is missing.",
        DEAD: "Three heartbeats in a row are missing; nothing new is placed or routed here.",
    },
)
