"""What goes between the stores of simulated nodes: a rate for each link and disk, a step at a time. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from workers.protocol.weights import SwarmComplaint, WeightsWanted
from workers.simulation.weights import Download, Pull, SimulatedStore, StoreShape

ORIGIN = "origin"
_STEP_SECONDS = 0.25
_LONGEST_STEP_SECONDS = 1.0
_MOST_STEPS = 240
"""After a longer pause the rest of it is as if nothing had been sent."""
_PEER = "peer"


@dataclass(slots=True)
class _Flow:
    """One stripe of one download, in one step."""

    child: SimulatedStore
    wanted: WeightsWanted
    download: Download
    stripe: int
    parent: str
    pull: Pull

    @property
    def size_bytes(self) -> float:
        """Of the whole stripe."""
        return self.download.total_bytes / len(self.download.stripes)

    @property
    def left_bytes(self) -> float:
        """That are not there yet."""
        return max(0.0, self.size_bytes - self.download.stripes[self.stripe])


class PieceNetwork:
    """The stores of one process, and what goes between them."""

    def __init__(self, shape: StoreShape, in_use: Callable[[str], Collection[str]], *, now: float) -> None:
        """`in_use`: revisions that replicas of a node run from."""
        self.stores: dict[str, SimulatedStore] = {}
        self._shape = shape
        self._in_use = in_use
        self._at = now

    def add(self, node_id: str) -> SimulatedStore:
        """One more node."""
        self.stores[node_id] = store = SimulatedStore(node_id, self._shape)
        return store

    def advance(self, now: float) -> None:
        """Let bytes move until now."""
        steps = 0
        while now - self._at >= _STEP_SECONDS and steps < _MOST_STEPS:
            seconds = min(_LONGEST_STEP_SECONDS, now - self._at)
            self._at += seconds
            self._step(seconds)
            steps += 1
        if steps == _MOST_STEPS:
            self._at = now

    def _step(self, seconds: float) -> None:
        flows = list(self._flows())
        for store in self.stores.values():
            store.streams = {}
        if not flows:
            return
        takes = Counter(flow.child.node_id for flow in flows)
        gives = Counter(flow.parent for flow in flows if flow.parent)
        moved = [(flow, self._moved(flow, takes, gives, seconds)) for flow in flows]
        for flow, count in moved:  # all at once: who gives has what it had before
            self._arrive(flow, count, seconds)
        for node_id, revision in dict.fromkeys((flow.child.node_id, flow.wanted.revision) for flow in flows):
            child = self.stores[node_id]
            download = child.downloads.get(revision)
            if download is not None and download.have_bytes >= download.total_bytes:
                child.finish(revision, self._in_use(node_id))

    def _flows(self) -> Iterator[_Flow]:
        for store in self.stores.values():
            if store.off or store.full:
                continue
            for revision, download in store.downloads.items():
                if download.runs:
                    yield from self._flows_of(store, store.wanted[revision], download)

    def _flows_of(self, store: SimulatedStore, wanted: WeightsWanted, download: Download) -> Iterator[_Flow]:
        orders = _orders(wanted)
        if orders:
            download.cut(len(orders))
        for number, pull in enumerate(download.pulls):
            parent = self._parent(orders[number], download) if orders else ""
            if parent != pull.parent:
                pull.parent, pull.since, pull.starved_ratio = parent, self._at, 0.0
            flow = _Flow(store, wanted, download, number, parent, pull)
            if flow.left_bytes <= 0:
                pull.stage, pull.bytes_per_second = "done", 0.0
            elif not parent:
                pull.stage, pull.bytes_per_second = "waiting", 0.0
            else:
                yield flow

    def _parent(self, told: Sequence[str], download: Download) -> str:
        """The first that answers; those before it are complained about."""
        for parent in told:
            store = self.stores.get(parent)
            if parent == ORIGIN or store is None or not store.off:
                return parent
            download.complaints[parent] = SwarmComplaint(parent=parent, unreachable=True)
        return ""

    def _moved(self, flow: _Flow, takes: Counter[str], gives: Counter[str], seconds: float) -> float:
        child, share = flow.child, takes[flow.child.node_id]
        parent = self.stores.get(flow.parent)
        given = self._shape.origin_bytes_per_second
        if flow.parent != ORIGIN:
            given = (parent or child).link_bytes_per_second
        rates = {
            "network": child.link_bytes_per_second / share,
            "disk": self._shape.write_bytes_per_second / share,
            "parent": given / gives[flow.parent],
            "cap": (flow.wanted.bytes_per_second or float("inf")) / len(flow.download.stripes),
        }
        flow.pull.bottleneck = min(rates, key=lambda name: rates[name])
        could = rates[flow.pull.bottleneck] * seconds
        there = flow.left_bytes if parent is None else self._there(flow, parent)
        starved = there < min(could, flow.left_bytes)
        flow.pull.starved_ratio = round(0.7 * flow.pull.starved_ratio + 0.3 * starved, 2)
        flow.pull.stage = "starved" if there <= 0 else "flowing"
        return min(could, there, flow.left_bytes)

    def _there(self, flow: _Flow, parent: SimulatedStore) -> float:
        """What a parent has that the child has not."""
        if flow.wanted.revision in parent.whole:
            return flow.left_bytes
        download = parent.downloads.get(flow.wanted.revision)
        if download is None:
            return 0.0
        same = len(download.stripes) == len(flow.download.stripes)
        have = download.stripes[flow.stripe] if same else 0.0
        return max(0.0, have - flow.download.stripes[flow.stripe])

    def _arrive(self, flow: _Flow, count: float, seconds: float) -> None:
        pull, download = flow.pull, flow.download
        parent = self.stores.get(flow.parent)
        if parent is not None and parent.gives_damaged and count:
            before = download.complaints.get(flow.parent)
            bad = 1 + (before.bad_pieces if before is not None else 0)
            download.complaints[flow.parent] = SwarmComplaint(parent=flow.parent, bad_pieces=bad)
            download.damaged_pieces += 1
            pull.why = "a piece was not what the manifest says (simulated)"
            count = 0.0
        download.stripes[flow.stripe] += count
        pull.bytes_per_second = round(count / seconds, 1)
        if not count:
            return
        if flow.parent == ORIGIN:
            kind = flow.wanted.sources[0].kind if flow.wanted.sources else "folder"
            download.sources[kind, "simulated origin"] += round(count)
            return
        download.sources[_PEER, flow.parent] += round(count)
        if parent is None:
            return  # another process simulates it
        streams = parent.streams.setdefault(flow.wanted.revision, {})
        streams[flow.child.node_id] = streams.get(flow.child.node_id, 0.0) + pull.bytes_per_second


def _orders(wanted: WeightsWanted) -> tuple[tuple[str, ...], ...]:
    """Whom each stripe may be pulled from; none at all: it waits to be told."""
    if wanted.swarm is None:
        return ((ORIGIN,),)
    return tuple(tuple(one.node_id for one in parents) for parents in wanted.swarm.stripes)
