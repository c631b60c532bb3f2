"""Ours and plain HTTP: the product's own transfer, planned by the product's own planner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from bench.swarm.contest import NodeProcess, Outcome, Stage, Weights, give_keys, measure, staged
from exaserve_ops.rollouts.domain.swarm import ORIGIN, Origin, Peer, Swarm, SwarmPlan
from exaserve_ops.rollouts.domain.swarm_health import Complaint, FeedSeen, Verdicts, corrected, judge
from exaserve_ops.rollouts.domain.swarm_planning import plan_swarm

HEARD_SECONDS = 5.0
"""A node that has told nothing for so long counts as dead; it tells ten times a second."""
_STEP_SECONDS = 0.25
_WINDOW_SECONDS = 5.0
"""That nodes measure their rates over."""


class Director:
    """Stands in for the control plane: plans from what nodes tell, and tells them the plan."""

    def __init__(self, stage: Stage, bytes_per_second: float, *, racks: Callable[[int], str]) -> None:
        self._stage = stage
        self._rate = bytes_per_second
        self._racks = racks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._told: dict[str, object] = {}
        self._starved: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
        self._verdicts = Verdicts()
        self.plan: SwarmPlan | None = None
        self.plans = 0

    def start(self) -> None:
        """Plan and tell, now and from now on."""
        self.step()
        self._thread.start()

    def stop(self) -> None:
        """Plan no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_STEP_SECONDS):
            self.step()

    def step(self) -> None:
        """Look once, and tell whoever's parents changed."""
        now = time.monotonic()
        nodes = [node for node in self._stage.nodes if now - node.heard_at < HEARD_SECONDS]
        if self.plan is not None:
            self._verdicts = judge(self.plan, self._seen(nodes, now), _complaints(nodes), self._verdicts)
        swarm = self._swarm(nodes)
        plan = plan_swarm(swarm, self.plan)
        self.plans += plan != self.plan
        self.plan = plan
        reached = {node.name: node for node in nodes}
        for node in nodes:
            self._tell(node, plan, reached)

    def _swarm(self, nodes: Collection[NodeProcess]) -> Swarm:
        weights = self._stage.weights
        peers = tuple(
            corrected(
                Peer(
                    node.name,
                    self._racks(int(node.name[1:])),
                    node.status.get("have", 0) / weights.total_bytes,
                    self._rate,
                    self._rate,
                ),
                self._verdicts,
            )
            for node in nodes
            if not node.status.get("failure")
        )
        origin = Origin(self._rate)
        return Swarm(weights.total_bytes, weights.piece_bytes, peers, origin, self._verdicts.apart)

    def _tell(self, node: NodeProcess, plan: SwarmPlan, reached: dict[str, NodeProcess]) -> None:
        feeds = plan.of(node.name)
        stripes = [
            [_address(n, reached) for n in (feed.parent, *feed.alternatives) if n == ORIGIN or n in reached]
            for feed in sorted(feeds, key=lambda f: f.stripe)
        ]
        if stripes and len(stripes) == plan.stripes and self._told.get(node.name) != stripes:
            self._told[node.name] = stripes
            node.tell({"follow": stripes})

    def _seen(self, nodes: Collection[NodeProcess], now: float) -> list[FeedSeen]:
        return [
            self._feed_seen(node.name, pull, now)
            for node in nodes
            for pull in node.status.get("pulls", ())
            if pull["stage"] in ("flowing", "starved")
        ]

    def _feed_seen(self, child: str, pull: dict[str, Any], now: float) -> FeedSeen:
        stripe, parent = pull["stripe"], pull["parent"]
        marks = self._starved.setdefault((child, stripe, parent), [])
        marks.append((now, pull["starved_seconds"]))
        while now - marks[0][0] > _WINDOW_SECONDS:
            marks.pop(0)
        lasted = now - marks[0][0]
        starved_ratio = (pull["starved_seconds"] - marks[0][1]) / max(lasted, _STEP_SECONDS)
        return FeedSeen(child, stripe, parent, pull["bytes_per_second"], starved_ratio, lasted)


def _complaints(nodes: Collection[NodeProcess]) -> list[Complaint]:
    bad = [
        Complaint(node.name, parent, bad_pieces=count)
        for node in nodes
        for parent, count in node.status.get("bad", {}).items()
    ]
    gone = [
        Complaint(node.name, parent, unreachable=True)
        for node in nodes
        for parent in node.status.get("gone", ())
    ]
    return bad + gone


def _address(name: str, reached: dict[str, NodeProcess]) -> tuple[str, str, int]:
    return (name, "", 0) if name == ORIGIN else (name, reached[name].place.address, reached[name].port)


def run_ours(weights: Weights, nodes: int, megabits: float, folder: Path, seconds: float) -> Outcome:
    """Send the weights as the planner says."""
    with staged(nodes, megabits, weights, folder) as stage:
        stage.start_origin()
        stage.start_nodes("bench.swarm.node")
        give_keys(stage)
        director = Director(stage, megabits * 125_000, racks=lambda _: "")
        try:
            return measure(stage, director.start, lambda: all(n.whole_at for n in stage.nodes), seconds)
        finally:
            director.stop()


def run_central(weights: Weights, nodes: int, megabits: float, folder: Path, seconds: float) -> Outcome:
    """Have every node take everything from the origin, in one stream each."""
    with staged(nodes, megabits, weights, folder) as stage:
        stage.start_origin()
        stage.start_nodes("bench.swarm.node")

        def go() -> None:
            for node in stage.nodes:
                node.tell({"follow": [[(ORIGIN, "", 0)]]})

        return measure(stage, go, lambda: all(n.whole_at for n in stage.nodes), seconds)
