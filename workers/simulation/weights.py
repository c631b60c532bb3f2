"""Weights on a simulated node: bytes are arithmetic. Pure.

Nothing is stored and nothing is sent. What a node is told and what it reports are those of the real protocol,
what fits on its disk is decided by the agents' own rules, and each reason says that it is simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from workers.protocol.v1 import ApplyWeights
from workers.protocol.weights import (
    SwarmComplaint,
    SwarmPull,
    SwarmSeen,
    SwarmStream,
    WeightsFrom,
    WeightsHeld,
    WeightsReport,
    WeightsState,
    WeightsWanted,
)
from workers.weights.planning import Ready, StoreFacts, StorePlan, StorePolicy, Wanted, plan_store

PIECE_PORT = 41_999
"""Where simulated nodes say that they give pieces; nobody listens there."""
PIECE_BYTES = 4 << 20
_FULL = "no space left on device (simulated)"


@dataclass(frozen=True, slots=True)
class StoreShape:
    """What every node's disk and link are like; the origin is one for all nodes of a process."""

    policy: StorePolicy = field(default_factory=lambda: StorePolicy(margin_bytes=2 << 30))
    disk_bytes: int = 3_840_000_000_000
    write_bytes_per_second: float = 2e9
    link_bytes_per_second: float = 1.25e9
    origin_bytes_per_second: float = 2.5e9


@dataclass(slots=True)
class Whole:
    """A revision that is in its place."""

    total_bytes: int
    used: int
    damaged_pieces: int
    sources: Counter[tuple[str, str]]


@dataclass(slots=True)
class Pull:
    """How one stripe comes."""

    parent: str = ""
    since: float = 0.0
    stage: str = "waiting"
    bytes_per_second: float = 0.0
    starved_ratio: float = 0.0
    bottleneck: str = ""
    why: str = ""


@dataclass(slots=True)
class Download:
    """A revision on its way; `stripes` are bytes that are there of each."""

    total_bytes: int
    stripes: list[float] = field(default_factory=lambda: [0.0])
    pulls: list[Pull] = field(default_factory=lambda: [Pull()])
    sources: Counter[tuple[str, str]] = field(default_factory=Counter)
    damaged_pieces: int = 0
    complaints: dict[str, SwarmComplaint] = field(default_factory=dict)
    runs: bool = False

    @property
    def have_bytes(self) -> int:
        """Whole pieces."""
        have = sum(self.stripes)
        if have >= self.total_bytes - 0.5:
            return self.total_bytes
        return int(have) // PIECE_BYTES * PIECE_BYTES

    def cut(self, stripes: int) -> None:
        """Part it anew; what is there is spread over all."""
        if stripes != len(self.stripes):
            self.stripes = [sum(self.stripes) / stripes] * stripes
            self.pulls = [Pull() for _ in range(stripes)]


class SimulatedStore:
    """The weights of one node."""

    def __init__(self, node_id: str, shape: StoreShape) -> None:
        self.node_id = node_id
        self.shape = shape
        self.off = False
        self.full = False
        """Its disk takes nothing more."""
        self.gives_damaged = False
        self.link_factor = 1.0
        """By so much its link is slower."""
        self.revision = 0
        self.wanted: dict[str, WeightsWanted] = {}
        self.whole: dict[str, Whole] = {}
        self.downloads: dict[str, Download] = {}
        self.streams: dict[str, dict[str, float]] = {}
        """What it gives now: bytes per second by child, of each revision."""
        self._newest = (0, 0)
        self._uses = 0
        self._plan = StorePlan()

    @property
    def link_bytes_per_second(self) -> float:
        """What its link carries now, each way."""
        return self.shape.link_bytes_per_second / self.link_factor

    @property
    def used_bytes(self) -> int:
        """By weights, staged ones included."""
        whole = sum(one.total_bytes for one in self.whole.values())
        return whole + sum(one.have_bytes for one in self.downloads.values())

    @property
    def free_bytes(self) -> int:
        """Of its disk."""
        return 0 if self.full else self.shape.disk_bytes - self.used_bytes

    def take(self, command: ApplyWeights, in_use: Collection[str]) -> None:
        """Have these from now on; what came late is passed over."""
        told = (command.lease_epoch, command.revision)
        if told < self._newest:
            return
        self._newest, self.revision = told, command.revision
        self.wanted = {one.revision: one for one in command.weights}
        self.replan(in_use)

    def replan(self, in_use: Collection[str]) -> None:
        """Decide what is fetched and what goes, by the agents' own rules."""
        free = self.shape.disk_bytes - self.used_bytes
        wanted = [Wanted(w.revision, w.total_bytes, w.priority, w.paused) for w in self.wanted.values()]
        ready = {
            key: Ready(one.total_bytes, one.used, in_use=key in in_use) for key, one in self.whole.items()
        }
        staged = {key: one.have_bytes for key, one in self.downloads.items()}
        facts = StoreFacts(wanted, ready, staged, free, self.used_bytes)
        self._plan = plan = plan_store(facts, self.shape.policy)
        for key in (*plan.drop, *(key for key in plan.evict if not self.full)):
            self.downloads.pop(key, None)
            self.whole.pop(key, None)
        for key in plan.fetch:
            self.downloads.setdefault(key, Download(self.wanted[key].total_bytes))
        for key, one in self.downloads.items():
            one.runs = key in plan.fetch

    def missing(self, revision: str) -> str:
        """Why a replica cannot start from a revision now; empty where it can."""
        if revision in self.whole:
            return ""
        if revision not in self.wanted:
            return "its weights are not wanted on this node yet (simulated)"
        state, reason = self._state_of(revision)
        download = self.downloads.get(revision)
        ratio = download.have_bytes / download.total_bytes if download and download.total_bytes else 0.0
        return f"its weights are {state.value}, {ratio:.0%} are here: {reason}"

    def finish(self, revision: str, in_use: Collection[str]) -> None:
        """All of it is here: put it into its place."""
        done = self.downloads.pop(revision)
        self._uses += 1
        self.whole[revision] = Whole(done.total_bytes, self._uses, done.damaged_pieces, done.sources)
        self.replan(in_use)

    def damage(self, pieces: int, in_use: Collection[str]) -> None:
        """Bits of whole revisions on the disk have changed; a scrub finds it, and they are fetched again."""
        for key in sorted(self.whole.keys() & self.wanted.keys()):
            one = self.whole.pop(key)
            lost = min(one.total_bytes, pieces * PIECE_BYTES)
            again = Download(one.total_bytes, [float(one.total_bytes - lost)], [Pull()], one.sources)
            again.damaged_pieces = one.damaged_pieces + pieces
            self.downloads[key] = again
        self.replan(in_use)

    # -- reports -----------------------------------------------------------------------------------
    def report(self, now: float, in_use: Collection[str]) -> WeightsReport:
        """What its agent would say."""
        held = [self._held_whole(key, in_use) for key in self.whole]
        held += [self._held_missing(key, now) for key in self.wanted if key not in self.whole]
        held.sort(key=lambda one: (not one.wanted, one.revision))
        return WeightsReport(
            revision=self.revision,
            disk_total_bytes=self.shape.disk_bytes,
            disk_free_bytes=self.free_bytes,
            used_bytes=self.used_bytes,
            problem=_FULL if self.full else "",
            held=tuple(held),
            in_swarms=True,
            piece_port=PIECE_PORT if any(one.swarm is not None for one in self.wanted.values()) else 0,
        )

    def _held_whole(self, revision: str, in_use: Collection[str]) -> WeightsHeld:
        one = self.whole[revision]
        return WeightsHeld(
            revision=revision,
            state=WeightsState.READY,
            total_bytes=one.total_bytes,
            have_bytes=one.total_bytes,
            wanted=revision in self.wanted,
            in_use=revision in in_use,
            damaged_pieces=one.damaged_pieces,
            sources=_sources(one.sources),
            swarm=self._swarm(revision, None, one.total_bytes, 0.0),
        )

    def _held_missing(self, revision: str, now: float) -> WeightsHeld:
        wanted, download = self.wanted[revision], self.downloads.get(revision)
        state, reason = self._state_of(revision)
        have = download.have_bytes if download is not None else 0
        speed = 0.0
        if download is not None and state is WeightsState.FETCHING:
            speed = sum(pull.bytes_per_second for pull in download.pulls)
        return WeightsHeld(
            revision=revision,
            state=state,
            total_bytes=wanted.total_bytes,
            have_bytes=have,
            bytes_per_second=round(speed, 1),
            eta_seconds=round((wanted.total_bytes - have) / speed, 1) if speed else None,
            reason=reason,
            wanted=True,
            damaged_pieces=download.damaged_pieces if download is not None else 0,
            sources=_sources(download.sources) if download is not None else (),
            swarm=self._swarm(revision, download, have, now),
        )

    def _state_of(self, revision: str) -> tuple[WeightsState, str]:
        wanted, download = self.wanted[revision], self.downloads.get(revision)
        if self.full:
            return WeightsState.FAILED, _FULL
        if revision in self._plan.refused:
            return WeightsState.FAILED, f"{self._plan.refused[revision]} (simulated)"
        if wanted.paused:
            return WeightsState.PAUSED, "paused"
        if download is None or not download.runs:
            return WeightsState.WAITING, self._plan.waits.get(revision) or "begins in a moment"
        ratio = download.have_bytes / wanted.total_bytes if wanted.total_bytes else 1.0
        return WeightsState.FETCHING, f"{ratio:.0%} of {wanted.total_bytes:,} bytes (simulated)"

    def _swarm(self, revision: str, download: Download | None, have: int, now: float) -> SwarmSeen | None:
        wanted = self.wanted.get(revision)
        if wanted is None or wanted.swarm is None:
            return None
        streams = self.streams.get(revision, {})
        return SwarmSeen(
            pulls=() if download is None else tuple(_told(n, p, now) for n, p in enumerate(download.pulls)),
            complaints=() if download is None else tuple(download.complaints.values()),
            streams=tuple(SwarmStream(child=key, bytes_per_second=rate) for key, rate in streams.items()),
            pieces=-(-wanted.total_bytes // PIECE_BYTES),
            have_pieces=-(-have // PIECE_BYTES),
        )


def _told(stripe: int, pull: Pull, now: float) -> SwarmPull:
    return SwarmPull(
        stripe=stripe,
        parent=pull.parent,
        stage=pull.stage,
        bytes_per_second=pull.bytes_per_second,
        starved_ratio=pull.starved_ratio,
        lasted_seconds=round(now - pull.since, 1) if pull.parent else 0.0,
        bottleneck=pull.bottleneck,
        why=pull.why,
    )


def _sources(counts: Counter[tuple[str, str]]) -> tuple[WeightsFrom, ...]:
    return tuple(
        WeightsFrom(kind=kind, bytes=count, name=name) for (kind, name), count in counts.most_common(8)
    )
