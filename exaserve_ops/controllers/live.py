"""Builds the picture of the fleet that live pages show: once a second, once for all viewers."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Iterable, Mapping

import msgspec

from exaserve_ops.controllers.changes import Remembered
from exaserve_ops.controllers.directory import Directory, Row, read_directory
from exaserve_ops.controllers.feedback import Feedback
from exaserve_ops.controllers.fleet_state import FleetState, NodeView
from exaserve_ops.controllers.ports import LivePublisher, RouteWriter
from exaserve_ops.health.selectors import open_incidents
from exaserve_ops.lib import clock
from exaserve_ops.routing.domain.feedback import Weight
from exaserve_ops.routing.domain.records import NodeFacts, ReplicaFacts
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.observed import ObservedReplica, ReplicaLoad
from exaserve_ops.serving.domain.reports import HeartbeatReport
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.selectors import broken_replicas
from exaserve_ops.sessions.selectors import count_live_sessions
from exaserve_ops.telemetry.domain.frame_encoding import NO_VALUES, Cell, encode_frame
from exaserve_ops.telemetry.domain.frames import LOAD_METRICS
from exaserve_ops.telemetry.domain.pictures import LivePicture, NodeReport
from exaserve_ops.telemetry.domain.windows import FinishedRequest, History, RequestWindow

STALE_AFTER_SECONDS = 5.0
"""A value older than this is shown as stale: five reports are missing."""
COUNTS_EVERY_SECONDS = 2.0
LAYOUT_EVERY_SECONDS = 10.0
"""The layout goes out when it changed, and so often besides: a store that lost it gets it back."""

_values_of = operator.attrgetter(*(metric.key for metric in LOAD_METRICS))


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
        self._directory = Remembered(read_directory)
        self._layout_digest = ""
        self._layout_version = 0
        self._layout_at = -1e9
        self._published: dict[str, HeartbeatReport] = {}
        """The heartbeat of each node that was told last: the same one is not told again."""
        self._feedback = Feedback()
        self._wanted_replicas = 0
        self._sessions = 0
        self._slow_problems = 0
        self._counts_at = -1e9

    def count_request(self, request: FinishedRequest) -> None:
        """Count a finished request into the fleet's figures. Called from another thread."""
        with self._requests_lock:
            self._requests.add(request)

    def step(self) -> None:
        """Build and publish one picture."""
        self._sequence += 1
        now_seconds = clock.unix_seconds()
        directory = self._directory.get()
        known = directory.node_ids
        fresh = _fresh_views(self._state, known)
        views = {view.node_id: view for view in self._state.nodes() if view.node_id in known}
        heartbeats = {i: view.heartbeat for i, view in views.items() if view.heartbeat}
        news = {i: beat for i, beat in heartbeats.items() if self._published.get(i) is not beat}
        weights = self._weigh(directory, fresh)
        layout = self._layout(directory)
        frame = encode_frame(
            _cells(directory, views, fresh, weights),
            layout_version=self._layout_version,
            sequence=self._sequence,
            built_at_seconds=now_seconds,
        )
        self._publisher.publish(
            LivePicture(
                sequence=self._sequence,
                layout=layout,
                frame=frame,
                summary=self._summary(directory, fresh, now_seconds),
                nodes={i: _node_report(views[i], heartbeat) for i, heartbeat in news.items()},
                gone_nodes=tuple(self._published.keys() - known),
            )
        )
        self._routes.write_facts(
            [_node_facts(fresh[i], news[i], weights) for i in news.keys() & fresh.keys()]
        )
        self._published = heartbeats

    def _weigh(self, directory: Directory, fresh: Mapping[str, NodeView]) -> Mapping[str, Weight]:
        seen = (replica for view in fresh.values() if view.heartbeat for replica in view.heartbeat.replicas)
        return self._feedback.look(seen, directory.serving(), time.monotonic())

    def _layout(self, directory: Directory) -> bytes | None:
        now = time.monotonic()
        if directory.digest != self._layout_digest:
            self._layout_digest = directory.digest
            # Rises over restarts too: the sequence does.
            self._layout_version = self._sequence
        elif now - self._layout_at < LAYOUT_EVERY_SECONDS:
            return None
        self._layout_at = now
        return b'{"version":%d,' % self._layout_version + directory.layout[1:]

    def _summary(self, directory: Directory, fresh: Mapping[str, NodeView], now_seconds: float) -> bytes:
        with self._requests_lock:
            figures = self._requests.figures(now_seconds)
        simulated = [row for row in directory.rows if row.simulated]
        kv = _kv_figures(fresh, frozenset(row.node_id for row in simulated))
        self._count_slowly()
        ready = _count_ready(directory.rows)
        liveness = [row.liveness for row in directory.rows]
        alive = liveness.count("alive")
        summary = {
            "sequence": self._sequence,
            "built_at": now_seconds,
            "window_seconds": self._requests.seconds,
            # What is simulated is counted, and said beside: no page may show it as capacity.
            "nodes": {s: liveness.count(s) for s in ("alive", "suspect", "dead", "joining")}
            | {"simulated": len(simulated)},
            "replicas": {
                "ready": ready,
                "wanted": self._wanted_replicas,
                "simulated": _count_ready(simulated),
            },
            "requests_per_second": figures.requests_per_second,
            "tokens_per_second": figures.tokens_per_second,
            "ttft_seconds": {
                "p50": figures.ttft_p50_seconds,
                "p95": figures.ttft_p95_seconds,
                "p99": figures.ttft_p99_seconds,
            },
            "kv": kv,
            "sessions": {"live": self._sessions, "repinned": figures.repinned},
            # What the bell of each page counts: dead nodes, broken replicas, open incidents.
            "problems": liveness.count("dead") + self._slow_problems,
        }
        self._history.add(
            now_seconds,
            {
                "nodes_alive": float(alive),
                "replicas_ready": float(ready),
                "requests_per_second": figures.requests_per_second,
                "tokens_per_second": figures.tokens_per_second,
                "ttft_p95_seconds": figures.ttft_p95_seconds,
                "kv_used_ratio": kv["used_ratio"],
                "sessions_live": float(self._sessions),
            },
        )
        return msgspec.json.encode(summary | {"history": self._history.as_dict()})

    def _count_slowly(self) -> None:
        """Counts out of Postgres, a little less often than the picture."""
        now = time.monotonic()
        if now - self._counts_at >= COUNTS_EVERY_SECONDS:
            wanted = Deployment.objects.filter(status=states.ACTIVE).values_list("replicas", flat=True)
            self._wanted_replicas = sum(wanted)
            self._sessions = count_live_sessions(clock.now())
            self._slow_problems = broken_replicas().count() + open_incidents().count()
            self._counts_at = now


def _fresh_views(state: FleetState, known: frozenset[str]) -> dict[str, NodeView]:
    """Views of recorded nodes whose newest heartbeat is young enough to be believed."""
    return {
        view.node_id: view
        for view in state.nodes()
        if view.node_id in known and view.heartbeat and _age_seconds(view) <= STALE_AFTER_SECONDS
    }


def _cells(
    directory: Directory,
    views: Mapping[str, NodeView],
    fresh: Mapping[str, NodeView],
    weights: Mapping[str, Weight],
) -> list[Cell | None]:
    cells: list[Cell | None] = []
    for row in directory.rows:
        cells += _row_cells(row, views.get(row.node_id), weights, stale=row.node_id not in fresh)
        cells += [None] * (directory.columns - len(row.replicas))
    return cells


def _row_cells(row: Row, view: NodeView | None, weights: Mapping[str, Weight], *, stale: bool) -> list[Cell]:
    loads: dict[str, ReplicaLoad | None] = {}
    if view is not None and view.heartbeat is not None:
        loads = {seen.replica_id: seen.load for seen in view.heartbeat.replicas}
    return [
        _cell(replica.status, loads.get(replica.id), weights.get(replica.id), stale=stale)
        for replica in row.replicas
    ]


def _cell(status: int, load: ReplicaLoad | None, weight: Weight | None, *, stale: bool) -> Cell:
    if load is None:
        return Cell(status, NO_VALUES, stale=stale)
    values = (*_values_of(load), weight.value if weight else None)
    return Cell(status, values, stale=stale or load.age_seconds > STALE_AFTER_SECONDS)


def _age_seconds(view: NodeView) -> float:
    if view.last_report_seconds is None:
        return float("inf")
    return time.monotonic() - view.last_report_seconds


def _count_ready(rows: Iterable[Row]) -> int:
    return sum(replica.ready for row in rows for replica in row.replicas)


def _kv_figures(
    fresh: Mapping[str, NodeView], simulated_ids: frozenset[str]
) -> dict[str, float | int | None]:
    used = total = simulated = 0
    for node_id, view in fresh.items():
        is_simulated = node_id in simulated_ids
        for seen in view.heartbeat.replicas if view.heartbeat else ():
            load = seen.load
            if load is None or load.kv_total_blocks is None or load.kv_used_ratio is None:
                continue
            total += load.kv_total_blocks
            simulated += load.kv_total_blocks * is_simulated
            used += round(load.kv_used_ratio * load.kv_total_blocks)
    return {
        "used_blocks": used,
        "total_blocks": total,
        "simulated_blocks": simulated,
        "used_ratio": used / total if total else None,
    }


def _node_report(view: NodeView, heartbeat: HeartbeatReport) -> NodeReport:
    return NodeReport(view.last_report_unix_seconds, heartbeat.sequence, heartbeat.encoded)


def _node_facts(view: NodeView, heartbeat: HeartbeatReport, weights: Mapping[str, Weight]) -> NodeFacts:
    return NodeFacts(
        node_id=view.node_id,
        received_at_seconds=view.last_report_unix_seconds or 0.0,
        # Of one over several nodes the head alone answers, so it alone has a load.
        replicas=tuple(
            [
                _facts(seen, weights.get(seen.replica_id))
                for seen in heartbeat.replicas
                if not seen.member_number
            ]
        ),
    )


def _facts(seen: ObservedReplica, weight: Weight | None) -> ReplicaFacts:
    load = seen.load
    if load is None:
        return ReplicaFacts(seen.replica_id)
    return ReplicaFacts(
        seen.replica_id,
        load.requests_running,
        load.requests_waiting,
        load.kv_used_ratio,
        load.ttft_p95_seconds,
        1.0 if weight is None else weight.value,
        None if load.kv_evicted_idle_seconds is None else load.kv_evicted_idle_seconds + load.age_seconds,
    )
