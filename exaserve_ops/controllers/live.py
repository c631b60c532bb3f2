"""Builds the picture of the fleet that live pages show: once a second, once for all viewers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import time
from typing import Any
from uuid import UUID

from exaserve_ops.controllers.fleet_state import FleetState, NodeView, host_facts
from exaserve_ops.controllers.ports import LivePublisher, RouteWriter
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.selectors import nodes_with_hardware, rack_of
from exaserve_ops.lib import clock
from exaserve_ops.routing.domain.records import NodeFacts, ReplicaFacts
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.observed import ObservedReplica, ReplicaLoad
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.selectors import live_replicas
from exaserve_ops.sessions.selectors import count_live_sessions
from exaserve_ops.telemetry.domain.frames import METRICS, Cell, encode_frame
from exaserve_ops.telemetry.domain.pictures import LivePicture
from exaserve_ops.telemetry.domain.windows import FinishedRequest, History, RequestWindow

STALE_AFTER_SECONDS = 5.0
"""A value older than this is shown as stale: five reports are missing."""
SUMMARY_EVERY_SECONDS = 1.0
COUNTS_EVERY_SECONDS = 2.0


class LiveBuilder:
    """Holds the window and the history between two pictures."""

    def __init__(self, state: FleetState, publisher: LivePublisher, route_writer: RouteWriter) -> None:
        self._state = state
        self._publisher = publisher
        self._routes = route_writer
        self._requests = RequestWindow()
        self._requests_lock = threading.Lock()
        self._history = History()
        # A number that a new leader starts beyond what the old one reached.
        self._sequence = int(clock.unix_seconds()) & 0x7FFFFFFF
        self._layout_digest = ""
        self._layout_version = 0
        self._published_nodes: set[str] = set()
        self._counts: dict[str, Any] = {}
        self._counts_at = -1e9

    def count_request(self, request: FinishedRequest) -> None:
        """Count a finished request into the fleet's figures. Called from another thread."""
        with self._requests_lock:
            self._requests.add(request)

    def step(self) -> None:
        """Build and publish one picture."""
        self._sequence += 1
        now_seconds = clock.unix_seconds()
        replicas = list(live_replicas().exclude(node=None).order_by("node__name", "name"))
        nodes = sorted(nodes_with_hardware(), key=lambda node: (rack_of(node), node.name))
        rows = _rows(nodes, replicas)
        columns = max((len(row) for row in rows.values()), default=0)
        layout = self._layout(nodes, rows, columns)
        views = {view.node_id: view for view in self._state.nodes()}
        cells = self._cells(nodes, rows, columns, views)
        frame = encode_frame(
            cells,
            layout_version=self._layout_version,
            sequence=self._sequence,
            built_at_seconds=now_seconds,
        )
        known = {str(node.pk) for node in nodes}
        telemetry = {i: _node_json(v) for i, v in views.items() if i in known and v.heartbeat}
        self._publisher.publish(
            LivePicture(
                sequence=self._sequence,
                layout=layout,
                frame=frame,
                summary=self._summary(nodes, views, now_seconds),
                nodes=telemetry,
                gone_nodes=tuple(self._published_nodes - known),
            )
        )
        self._publish_facts(known, views)
        self._published_nodes = known

    def _layout(self, nodes: list[Node], rows: dict[str, list[Replica]], columns: int) -> bytes | None:
        body = {
            "statuses": list(states.REPLICA.statuses),
            "metrics": [dataclasses.asdict(metric) for metric in METRICS],
            "columns": columns,
            "rows": [_layout_row(node, rows[str(node.pk)], columns) for node in nodes],
        }
        digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        if digest != self._layout_digest:
            self._layout_digest = digest
            # Rises over restarts too: the sequence does.
            self._layout_version = self._sequence
        # Sent each time: it is small beside a second, and a lost Redis gets it back.
        return json.dumps(body | {"version": self._layout_version}).encode()

    def _cells(
        self,
        nodes: list[Node],
        rows: dict[str, list[Replica]],
        columns: int,
        views: dict[str, NodeView],
    ) -> list[Cell | None]:
        cells: list[Cell | None] = []
        for node in nodes:
            view = views.get(str(node.pk))
            seen = _by_id(view)
            stale = view is None or _age_seconds(view) > STALE_AFTER_SECONDS
            row: list[Cell | None] = [
                _cell(replica, seen.get(str(replica.pk)), stale=stale) for replica in rows[str(node.pk)]
            ]
            cells += row + [None] * (columns - len(row))
        return cells

    def _summary(self, nodes: list[Node], views: dict[str, NodeView], now_seconds: float) -> bytes:
        with self._requests_lock:
            figures = self._requests.figures(now_seconds)
        kv = _kv_figures(views)
        counts = self._slow_counts()
        liveness = [node.liveness for node in nodes]
        summary = {
            "sequence": self._sequence,
            "built_at": now_seconds,
            "window_seconds": self._requests.seconds,
            "nodes": {s: liveness.count(s) for s in ("alive", "suspect", "dead", "joining")},
            "replicas": counts["replicas"],
            "requests_per_second": figures.requests_per_second,
            "tokens_per_second": figures.tokens_per_second,
            "ttft_seconds": {
                "p50": figures.ttft_p50_seconds,
                "p95": figures.ttft_p95_seconds,
                "p99": figures.ttft_p99_seconds,
            },
            "kv": kv,
            "sessions": {"live": counts["sessions"], "moving": 0},
        }
        self._history.add(
            now_seconds,
            {
                "nodes_alive": float(summary["nodes"]["alive"]),
                "replicas_ready": float(counts["replicas"]["ready"]),
                "requests_per_second": figures.requests_per_second,
                "tokens_per_second": figures.tokens_per_second,
                "ttft_p95_seconds": figures.ttft_p95_seconds,
                "kv_used_ratio": kv["used_ratio"],
                "sessions_live": float(counts["sessions"]),
            },
        )
        return json.dumps(summary | {"history": self._history.as_dict()}).encode()

    def _slow_counts(self) -> dict[str, Any]:
        """Counts out of Postgres, a little less often than the picture."""
        now = time.monotonic()
        if now - self._counts_at >= COUNTS_EVERY_SECONDS:
            wanted = Deployment.objects.filter(status=states.ACTIVE).values_list("replicas", flat=True)
            ready = Replica.objects.filter(status=states.READY).count()
            self._counts = {
                "replicas": {"ready": ready, "wanted": sum(wanted)},
                "sessions": count_live_sessions(clock.now()),
            }
            self._counts_at = now
        return self._counts

    def _publish_facts(self, known: set[str], views: dict[str, NodeView]) -> None:
        for node_id, view in views.items():
            if node_id not in known or view.heartbeat is None:
                continue
            if _age_seconds(view) > STALE_AFTER_SECONDS:
                continue
            self._routes.write_facts(
                NodeFacts(
                    node_id=node_id,
                    received_at_seconds=view.last_report_unix_seconds or 0.0,
                    replicas=tuple(_facts(seen) for seen in view.heartbeat.replicas),
                )
            )


def known_node_ids() -> set[UUID]:
    """Ids of all recorded nodes."""
    return set(Node.objects.values_list("pk", flat=True))


def _rows(nodes: list[Node], replicas: list[Replica]) -> dict[str, list[Replica]]:
    rows: dict[str, list[Replica]] = {str(node.pk): [] for node in nodes}
    for replica in replicas:
        rows.setdefault(str(replica.node_id), []).append(replica)
    return rows


def _layout_row(node: Node, row: list[Replica], columns: int) -> dict[str, Any]:
    cells: list[dict[str, str] | None] = [
        {
            "id": str(replica.pk),
            "name": replica.name,
            "deployment": replica.deployment.name,
            "model": replica.deployment.served_name,
        }
        for replica in row
    ]
    return {
        "node_id": str(node.pk),
        "name": node.name,
        "rack": rack_of(node),
        "liveness": node.liveness,
        "simulated": node.simulated,
        "cells": cells + [None] * (columns - len(row)),
    }


def _cell(replica: Replica, seen: ObservedReplica | None, *, stale: bool) -> Cell:
    load = seen.load if seen is not None else None
    values = tuple(getattr(load, metric.key) if load else None for metric in METRICS)
    late = stale or (load is not None and load.age_seconds > STALE_AFTER_SECONDS)
    return Cell(states.REPLICA.statuses.index(replica.status), values, stale=late)


def _by_id(view: NodeView | None) -> dict[str, ObservedReplica]:
    if view is None or view.heartbeat is None:
        return {}
    return {seen.replica_id: seen for seen in view.heartbeat.replicas}


def _age_seconds(view: NodeView) -> float:
    if view.last_report_seconds is None:
        return float("inf")
    return time.monotonic() - view.last_report_seconds


def _kv_figures(views: dict[str, NodeView]) -> dict[str, float | int | None]:
    used = total = 0
    for view in views.values():
        if _age_seconds(view) > STALE_AFTER_SECONDS:
            continue
        for seen in _by_id(view).values():
            load: ReplicaLoad | None = seen.load
            if load is None or load.kv_total_blocks is None or load.kv_used_ratio is None:
                continue
            total += load.kv_total_blocks
            used += round(load.kv_used_ratio * load.kv_total_blocks)
    return {"used_blocks": used, "total_blocks": total, "used_ratio": used / total if total else None}


def _node_json(view: NodeView) -> bytes:
    if view.heartbeat is None:  # the caller asks only for those that have one
        raise AssertionError(view.node_id)
    return json.dumps(
        {
            "received_at": view.last_report_unix_seconds,
            "sequence": view.sequence,
            "host": host_facts(view),
            "replicas": {
                seen.replica_id: {
                    "state": seen.state,
                    "active_requests": seen.active_requests,
                    "uptime_seconds": seen.uptime_seconds,
                    "retry_in_seconds": seen.retry_in_seconds,
                    "load": dataclasses.asdict(seen.load) if seen.load else None,
                }
                for seen in view.heartbeat.replicas
            },
        }
    ).encode()


def _facts(seen: ObservedReplica) -> ReplicaFacts:
    load = seen.load or ReplicaLoad()
    return ReplicaFacts(
        replica_id=seen.replica_id,
        requests_running=load.requests_running,
        requests_waiting=load.requests_waiting,
        kv_used_ratio=load.kv_used_ratio,
        ttft_p95_seconds=load.ttft_p95_seconds,
    )
