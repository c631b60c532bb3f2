"""Lifecycles of deployments and replicas."""

from __future__ import annotations

from exaserve_ops.lib.lifecycle import Lifecycle, table

PENDING = "pending"
PLACED = "placed"
STARTING = "starting"
LOADING = "loading"
READY = "ready"
BACKING_OFF = "backing_off"
FAILED = "failed"
UNREACHABLE = "unreachable"
DRAINING = "draining"
STOPPING = "stopping"
STOPPED = "stopped"

_RUNNING = (STARTING, LOADING, READY, BACKING_OFF)
_WANTED = (PLACED, *_RUNNING, FAILED, UNREACHABLE)

REPLICA = Lifecycle(
    name="replica",
    initial=PENDING,
    statuses=(
        PENDING,
        PLACED,
        STARTING,
        LOADING,
        READY,
        BACKING_OFF,
        FAILED,
        UNREACHABLE,
        DRAINING,
        STOPPING,
        STOPPED,
    ),
    final=frozenset({STOPPED}),
    transitions=table(
        [
            ("place", [PENDING], PLACED),
            ("unplace", [PLACED], PENDING),
            # What the agent saw. It may skip steps: heartbeats are samples.
            ("seen_waiting", [*_RUNNING, FAILED, UNREACHABLE], PLACED),
            ("seen_starting", [s for s in _WANTED if s != STARTING], STARTING),
            ("seen_loading", [s for s in _WANTED if s != LOADING], LOADING),
            ("seen_ready", [s for s in _WANTED if s != READY], READY),
            ("seen_backing_off", [s for s in _WANTED if s != BACKING_OFF], BACKING_OFF),
            ("seen_failed", [s for s in _WANTED if s != FAILED], FAILED),
            ("node_lost", _RUNNING, UNREACHABLE),
            # What was decided. Only a ready replica has anything to let go of.
            ("drain", [READY], DRAINING),
            ("stop", [*_WANTED, DRAINING], STOPPING),
            ("cancel", [PENDING], STOPPED),
            ("seen_stopping", [DRAINING], STOPPING),
            ("seen_stopped", [DRAINING, STOPPING], STOPPED),
            # Its node was retired: nobody will ever report it again.
            ("write_off", [*_WANTED, DRAINING, STOPPING], STOPPED),
        ]
    ),
    meanings={
        PENDING: "Wanted; no node has been found yet.",
        PLACED: "A node is chosen; its agent has not launched it yet.",
        STARTING: "The process runs and has not opened its port.",
        LOADING: "The port is open; the engine loads weights.",
        READY: "The engine answers.",
        BACKING_OFF: "The last attempt ended; the next one starts after a pause.",
        FAILED: "Its agent gave it up; it is replaced on another node, or says why not.",
        UNREACHABLE: "Its node is dead or cut off; the process may still run.",
        DRAINING: "First turns go elsewhere; its sessions move, then its open requests end.",
        STOPPING: "Told to stop; its process group is not gone yet.",
        STOPPED: "Its process group is gone.",
    },
)

ACTIVE = "active"
DELETING = "deleting"
DELETED = "deleted"

DEPLOYMENT = Lifecycle(
    name="deployment",
    initial=ACTIVE,
    statuses=(ACTIVE, DELETING, DELETED),
    final=frozenset({DELETED}),
    transitions=table([("delete", [ACTIVE], DELETING), ("emptied", [DELETING], DELETED)]),
    meanings={
        ACTIVE: "Its replicas are kept running.",
        DELETING: "Its replicas are drained and stopped.",
        DELETED: "Gone; kept for the history.",
    },
)
