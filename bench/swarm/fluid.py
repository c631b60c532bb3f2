"""Large fleets, simulated: streams that share uplinks, downlinks and links of racks, in small steps of time.

A child takes only what its parent has had for a piece's time, so pipelines fill as they do on real links.
Each link is shared evenly by the streams that have something to carry, which is what TCP comes to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from exaserve_ops.rollouts.domain.swarm import ORIGIN, Origin, Peer, Swarm
from exaserve_ops.rollouts.domain.swarm_planning import plan_swarm

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet as data centres have them: racks whose way out is narrower than their nodes together."""

    nodes: int = 256
    rack_nodes: int = 16
    node_bytes_per_second: float = 1.25e9
    rack_bytes_per_second: float = 5e9
    """Both ways; a quarter of what 16 nodes could send."""
    origin_bytes_per_second: float = 1.25e9
    total_bytes: int = 140 * 10**9
    piece_bytes: int = 4 * 1024 * 1024

    def names(self) -> list[str]:
        """Ids of its nodes."""
        return [f"n{number:03d}" for number in range(self.nodes)]

    def rack_of(self, name: str) -> int:
        """Number of a node's rack."""
        return int(name[1:]) // self.rack_nodes

    def swarm(self, gone: frozenset[str] = frozenset(), have: Mapping[str, float] | None = None) -> Swarm:
        """What the planner is told of it."""
        rate = self.node_bytes_per_second
        peers = tuple(
            Peer(name, f"r{self.rack_of(name):03d}", (have or {}).get(name, 0.0), rate, rate)
            for name in self.names()
            if name not in gone
        )
        return Swarm(self.total_bytes, self.piece_bytes, peers, Origin(self.origin_bytes_per_second))


Edge = tuple[str, str, int]
"""Child, parent, stripe."""


class Flow:
    """Bytes that every node has of every stripe, moved along edges that may be changed on the way."""

    def __init__(self, fleet: Fleet, stripes: int) -> None:
        self.fleet = fleet
        self.stripes = stripes
        self.place = {name: number for number, name in enumerate([*fleet.names(), ORIGIN])}
        self.have = np.zeros((stripes, len(self.place)))
        self.have[:, -1] = fleet.total_bytes / stripes
        self.now = 0.0
        self.origin_bytes = 0.0
        racks = [fleet.rack_of(name) for name in fleet.names()]
        self.rack = np.array([*racks, max(racks) + 1])
        self.up = np.full(len(self.place), fleet.node_bytes_per_second)
        self.up[-1] = fleet.origin_bytes_per_second
        self._children = self._parents = self._stripe = np.zeros(0, dtype=np.int64)

    def follow(self, edges: Sequence[Edge]) -> None:
        """Pull along these edges from now on."""
        self._children = np.array([self.place[child] for child, _, _ in edges])
        self._parents = np.array([self.place[parent] for _, parent, _ in edges])
        self._stripe = np.array([stripe for _, _, stripe in edges])

    def step(self, seconds: float) -> None:
        """Move on."""
        children, parents, stripe = self._children, self._parents, self._stripe
        whole = self.fleet.total_bytes / self.stripes
        gives = self.have[stripe, parents]
        # Of what is still on its way to the parent, the last piece cannot be passed on.
        gives = np.where(gives >= whole, gives, gives - self.fleet.piece_bytes)
        room = np.clip(gives - self.have[stripe, children], 0.0, None)
        moved = np.minimum(room, self._rates(room > 0) * seconds)
        np.add.at(self.have, (stripe, children), moved)
        self.origin_bytes += float(moved[parents == self.place[ORIGIN]].sum())
        self.now += seconds

    def _rates(self, active: npt.NDArray[np.bool_]) -> Floats:
        children, parents = self._children, self._parents
        busy = active.astype(np.float64)
        sends = np.bincount(parents, busy, len(self.place))
        takes = np.bincount(children, busy, len(self.place))
        rates = np.minimum(
            self.up[parents] / np.maximum(sends[parents], 1.0),
            self.fleet.node_bytes_per_second / np.maximum(takes[children], 1.0),
        )
        leaving, entering = self.rack[parents], self.rack[children]
        crosses = busy * (leaving != entering)
        out = np.bincount(leaving, crosses, self.rack.max() + 1)
        into = np.bincount(entering, crosses, self.rack.max() + 1)
        limit = np.full(self.rack.max() + 1, self.fleet.rack_bytes_per_second)
        limit[-1] = np.inf  # of the origin, whose own link is all that bounds it on its way out
        shared = np.minimum(
            limit[leaving] / np.maximum(out[leaving], 1.0), limit[entering] / np.maximum(into[entering], 1.0)
        )
        return np.where(crosses > 0, np.minimum(rates, shared), rates) * busy

    def ratio(self, name: str) -> float:
        """Share of all bytes that a node has."""
        return float(self.have[:, self.place[name]].sum()) / self.fleet.total_bytes

    def whole(self, names: Sequence[str]) -> bool:
        """Whether all of these nodes have all."""
        places = [self.place[name] for name in names]
        return bool((self.have[:, places] >= self.fleet.total_bytes / self.stripes - 1.0).all())


def planned(fleet: Fleet, deaths: Mapping[float, str] | None = None) -> tuple[float, float]:
    """Seconds and origin copies under the product's plans; nodes die when they are said to, by second."""
    plan = plan_swarm(fleet.swarm())
    flow = Flow(fleet, plan.stripes)
    flow.follow([(feed.child, feed.parent, feed.stripe) for feed in plan.feeds])
    step = fleet.piece_bytes * plan.stripes / fleet.node_bytes_per_second / 2
    due = sorted((deaths or {}).items())
    gone: frozenset[str] = frozenset()
    replans: list[float] = []
    left = fleet.names()
    while not flow.whole(left):
        if due and flow.now >= due[0][0]:
            gone |= {due.pop(0)[1]}
            left = [name for name in fleet.names() if name not in gone]
            flow.follow([(f.child, f.parent, f.stripe) for f in plan.feeds if not {f.child, f.parent} & gone])
            replans.append(flow.now + DETECTION_SECONDS)
        if replans and flow.now >= replans[0]:
            replans.pop(0)
            have = {name: flow.ratio(name) for name in left}
            plan = plan_swarm(fleet.swarm(gone, have), plan)
            flow.follow([(f.child, f.parent, f.stripe) for f in plan.feeds])
        flow.step(step)
    return flow.now, flow.origin_bytes / fleet.total_bytes


DETECTION_SECONDS = 5.0
"""From a death until orphans have new parents, with nobody helping themselves meanwhile."""


def tree(fleet: Fleet, *, fan_out: int = 2) -> float:
    """Seconds of a tree broadcast: one tree in the order of names, each node giving to this many."""
    names = fleet.names()
    flow = Flow(fleet, 1)
    flow.follow([(name, names[(n - 1) // fan_out] if n else ORIGIN, 0) for n, name in enumerate(names)])
    return _until_whole(flow, names, fleet.piece_bytes / fleet.node_bytes_per_second)


def central(fleet: Fleet) -> float:
    """Seconds of everyone taking everything from the origin."""
    flow = Flow(fleet, 1)
    flow.follow([(name, ORIGIN, 0) for name in fleet.names()])
    expected = fleet.nodes * fleet.total_bytes / fleet.origin_bytes_per_second
    return _until_whole(flow, fleet.names(), expected / 5000)


def _until_whole(flow: Flow, names: Sequence[str], step: float) -> float:
    while not flow.whole(names):
        flow.step(step)
    return flow.now


def report(fleet: Fleet) -> dict[str, float]:
    """Every way, in seconds and over the bound of one link, all simulated."""
    bound = fleet.total_bytes / fleet.node_bytes_per_second
    ours, copies = planned(fleet)
    dying = {bound * (0.1 + 0.1 * n): f"n{(n * 37 + 5) % fleet.nodes:03d}" for n in range(8)}
    faulty, faulty_copies = planned(fleet, dying)
    faster = replace(fleet, origin_bytes_per_second=fleet.origin_bytes_per_second * 10)
    return {
        "simulated_bound_seconds": bound,
        "simulated_ours_seconds": ours,
        "simulated_ours_ratio_to_bound": ours / bound,
        "simulated_ours_origin_copies": copies,
        "simulated_ours_8_deaths_seconds": faulty,
        "simulated_ours_8_deaths_origin_copies": faulty_copies,
        "simulated_tree_seconds": tree(fleet),
        "simulated_tree_wide_racks_seconds": tree(replace(fleet, rack_bytes_per_second=1e15)),
        "simulated_central_seconds": central(fleet),
        "simulated_central_10x_origin_seconds": central(faster),
    }
