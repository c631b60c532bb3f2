"""Liveness of a node: derived by the failure detector; a person can only retire a node."""

from __future__ import annotations

from exaserve_ops.lib.lifecycle import Lifecycle, table

JOINING = "joining"
ALIVE = "alive"
SUSPECT = "suspect"
DEAD = "dead"
RETIRED = "retired"

NODE_LIVENESS = Lifecycle(
    name="node",
    initial=JOINING,
    statuses=(JOINING, ALIVE, SUSPECT, DEAD, RETIRED),
    final=frozenset({RETIRED}),
    transitions=table(
        [
            ("reported", [JOINING, SUSPECT], ALIVE),
            ("missed", [ALIVE], SUSPECT),
            ("lost", [ALIVE, SUSPECT], DEAD),
            ("recovered", [DEAD], ALIVE),
            ("retired", [JOINING, ALIVE, SUSPECT, DEAD], RETIRED),
        ]
    ),
    meanings={
        JOINING: "Enrolled; its agent has not reported yet.",
        ALIVE: "Heartbeats arrive.",
        SUSPECT: "At least one heartbeat in a row is missing.",
        DEAD: "Three heartbeats in a row are missing; nothing new is placed or routed here.",
        RETIRED: "Its agent was removed on purpose; the record stays for the history of its replicas.",
    },
)
