"""A cold fleet starts, in turns and all at once, in one model: `python -m bench.staged_start [--json]`.

Everything here is simulated but the decisions: turns are those of `serving.domain.starts`, who passes weights
on to whom is planned by `rollouts.domain.swarm_planning`, and links are shared as in `bench.swarm.fluid`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum

from bench.swarm.fluid import Fleet, Flow
from exaserve_ops.rollouts.domain.swarm import ORIGIN
from exaserve_ops.rollouts.domain.swarm_planning import plan_swarm
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.starts import (
    Starter,
    StartFacts,
    StartLimits,
    StartNode,
    WeightsAtHand,
    plan_starts,
)

_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
_REVISION = "w"
NO_LIMITS = StartLimits(per_node=0, per_fleet=0, from_origins=0, in_place=0, per_rack=0)


class Source(Enum):
    """Where nodes get weights."""

    SWARM = "copies, passed on"
    ORIGIN = "copies, each from the origin"
    IN_PLACE = "in place, on one file server"


@dataclass(frozen=True, slots=True)
class Site:
    """Nodes and what they read from. Rates in bytes a second."""

    fleet: Fleet = field(default_factory=Fleet)
    replicas_per_node: int = 12
    disk: float = 6e9
    memory: float = 20e9
    """From a node's memory to its cards, shared by replicas that load; what was read once is still there."""
    file_server: float = 10e9
    warm_seconds: float = 20.0
    start_seconds: float = 300.0 + 140e9 / (100 << 20)
    """As a deployment of such a model has it unless told; a longer start is ended and begun again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one way went."""

    source: str
    staged: bool
    origin_copies: float
    most_from_source: int
    """Nodes that read from the origin or the file server at the same time."""
    most_on_a_node: int
    most_at_once: int
    first_ready_seconds: float
    half_ready_seconds: float
    all_ready_seconds: float
    starts_ended_by_time: int


@dataclass(slots=True)
class _Replica:
    starter: Starter
    loaded: float = 0.0
    warm_since: float | None = None
    began: float | None = None
    """When its process began, for its time limit."""


class World:
    """One way of starting, in steps of time."""

    def __init__(self, site: Site, source: Source, limits: StartLimits) -> None:
        self.site, self.source, self.limits = site, source, limits
        self.now = 0.0
        self.names = site.fleet.names()
        self.replicas = {
            f"{node}/{number:02}": _Replica(_waiting(f"{node}/{number:02}", node, site, source))
            for number in range(site.replicas_per_node)
            for node in self.names
        }
        self.read = dict.fromkeys(self.names, 0.0)
        """Bytes of the weights that are in a node's memory."""
        self.whole: set[str] = set()
        self.fetching: set[str] = set()
        self.ready_at: dict[str, float] = {}
        self.most = Counter[str]()
        self.ended = 0
        self.served_bytes = 0.0
        self.flow = Flow(site.fleet, 2 if source is Source.SWARM else 1)

    def run(self, step: float) -> Outcome:
        """Until all are ready."""
        while len(self.ready_at) < len(self.replicas):
            self._let_go()
            self._fetch(step)
            self._load(step)
            self.now += step
        return self._outcome()

    # -- whose turn it is ------------------------------------------------------------------------
    def _let_go(self) -> None:
        waiting = [r for r in self.replicas.values() if r.starter.waits_since is not None]
        if not waiting:
            return
        plan = plan_starts(self._facts(), now=_BEGAN + timedelta(seconds=self.now))
        for name in plan.go:
            one = self.replicas[name]
            moment = _BEGAN + timedelta(seconds=self.now)
            one.starter = replace(one.starter, waits_since=None, allowed_at=moment, status_since=moment)

    def _facts(self) -> StartFacts:
        swarms = self.source is Source.SWARM
        ready_nodes = {name.partition("/")[0] for name in self.ready_at}
        here = ready_nodes if self.source is Source.IN_PLACE else self.whole
        racks = {name: f"rack-{self.site.fleet.rack_of(name)}" for name in self.names}
        return StartFacts(
            starters=tuple(r.starter for name, r in self.replicas.items() if name not in self.ready_at),
            nodes={name: StartNode(name, racks[name], swarms=swarms) for name in self.names},
            weights=WeightsAtHand(
                here=frozenset((name, _REVISION) for name in here),
                fetching=frozenset((name, _REVISION) for name in self.fetching),
                seeded=frozenset({_REVISION}) if self.whole else frozenset(),
            ),
            limits=self.limits,
        )

    # -- weights onto disks ----------------------------------------------------------------------
    def _fetch(self, step: float) -> None:
        if self.source is Source.IN_PLACE:
            return
        wanting = {r.starter.node_id for r in self.replicas.values() if r.starter.waits_since is None}
        fresh = wanting - self.whole - self.fetching
        if fresh:
            self.fetching |= fresh
            self._plan_fetches()
        if not self.fetching:
            return
        pieces = max(1, round(step / 0.02)) if self.source is Source.SWARM else 1
        for _ in range(pieces):
            self.flow.step(step / pieces)
        done = {name for name in self.fetching if self.flow.ratio(name) >= 1.0 - 1e-9}
        if self.source is Source.ORIGIN:
            self.most["source"] = max(self.most["source"], len(self.fetching))
        if done:
            self.fetching -= done
            self.whole |= done
            self._plan_fetches()

    def _plan_fetches(self) -> None:
        if self.source is Source.ORIGIN:
            self.flow.follow([(name, ORIGIN, 0) for name in sorted(self.fetching)])
            return
        here = self.fetching | self.whole
        gone = frozenset(name for name in self.names if name not in here)
        plan = plan_swarm(self.site.fleet.swarm(gone, {name: self.flow.ratio(name) for name in here}))
        self.flow.follow([(feed.child, feed.parent, feed.stripe) for feed in plan.feeds])
        takers = {feed.child for feed in plan.feeds if feed.parent == ORIGIN}
        self.most["source"] = max(self.most["source"], len(takers))

    # -- weights into engines --------------------------------------------------------------------
    def _load(self, step: float) -> None:
        loading = [r for r in self.replicas.values() if self._loads(r)]
        on_node = Counter(r.starter.node_id for r in loading)
        self.most["node"] = max(self.most["node"], *on_node.values(), 0)
        self.most["fleet"] = max(self.most["fleet"], len(loading))
        self._read(on_node, step)
        total = float(self.site.fleet.total_bytes)
        for one in loading:
            node = one.starter.node_id
            if one.began is None:
                one.began = self.now
                one.starter = replace(
                    one.starter, status=states.LOADING, status_since=_BEGAN + timedelta(seconds=self.now)
                )
            one.loaded = min(self.read[node], one.loaded + self.site.memory / on_node[node] * step)
            if one.loaded >= total:
                one.warm_since = self.now if one.warm_since is None else one.warm_since
                if self.now - one.warm_since >= self.site.warm_seconds:
                    self.ready_at[one.starter.id] = self.now
            elif self.now - one.began > self.site.start_seconds:
                # Ended as not ready; what its node has read so far is still in memory.
                one.loaded, one.began = 0.0, self.now
                self.ended += 1

    def _loads(self, one: _Replica) -> bool:
        if one.starter.waits_since is not None or one.starter.id in self.ready_at:
            return False
        return self.source is Source.IN_PLACE or one.starter.node_id in self.whole

    def _read(self, on_node: Counter[str], step: float) -> None:
        total = float(self.site.fleet.total_bytes)
        reading = [node for node in on_node if self.read[node] < total]
        rate = self.site.disk
        if self.source is Source.IN_PLACE and reading:
            self.most["source"] = max(self.most["source"], len(reading))
            rate = min(self.site.fleet.node_bytes_per_second, self.site.file_server / len(reading))
        for node in reading:
            more = min(total - self.read[node], rate * step)
            self.read[node] += more
            self.served_bytes += more if self.source is Source.IN_PLACE else 0.0

    def _outcome(self) -> Outcome:
        times = sorted(self.ready_at.values())
        left_source = self.served_bytes if self.source is Source.IN_PLACE else self.flow.origin_bytes
        return Outcome(
            source=self.source.value,
            staged=self.limits != NO_LIMITS,
            origin_copies=left_source / self.site.fleet.total_bytes,
            most_from_source=self.most["source"],
            most_on_a_node=self.most["node"],
            most_at_once=self.most["fleet"],
            first_ready_seconds=times[0],
            half_ready_seconds=times[len(times) // 2],
            all_ready_seconds=times[-1],
            starts_ended_by_time=self.ended,
        )


def _waiting(name: str, node: str, site: Site, source: Source) -> Starter:
    return Starter(
        id=name,
        name=name,
        deployment="chat",
        node_id=node,
        revision=_REVISION,
        status=states.PLACED,
        status_since=_BEGAN,
        waits_since=_BEGAN,
        start_seconds=site.start_seconds,
        in_place=source is Source.IN_PLACE,
    )


_STEPS = {Source.SWARM: 1.0, Source.ORIGIN: 16.0, Source.IN_PLACE: 4.0}
"""Seconds of a step: looks are that far apart, too. Coarse where all takes hours."""


def compare(site: Site, sources: Sequence[Source] = tuple(Source)) -> list[Outcome]:
    """Each source, in turns by the limits as delivered and all at once."""
    return [
        World(site, source, limits).run(_STEPS[source])
        for source in sources
        for limits in (StartLimits(), NO_LIMITS)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    site = Site(Fleet(nodes=options.nodes))
    outcomes = compare(site)
    if options.json:
        told = {
            "simulated": True,
            "nodes": options.nodes,
            "replicas": options.nodes * site.replicas_per_node,
            "limits": asdict(StartLimits()),
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(map(_line, outcomes)))
    return 0


def _line(one: Outcome) -> str:
    way = "in turns" if one.staged else "all at once"
    return (
        f"{one.source:30} {way:12} simulated: {one.origin_copies:6.1f} copies, "
        f"{one.most_from_source:3} from the source at once, {one.most_at_once:5} load at once; "
        f"ready first {one.first_ready_seconds:7.0f} s, half {one.half_ready_seconds:7.0f} s, "
        f"all {one.all_ready_seconds:7.0f} s; {one.starts_ended_by_time} starts ended by their time limit"
    )


if __name__ == "__main__":
    sys.exit(main())
