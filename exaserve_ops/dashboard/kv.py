"""The KV memory of a node as its page shows it: pools, replicas, tiers and missed prefixes. Pure."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from exaserve_ops.dashboard.engine_words import connector_words

SERIES = 6
"""Colours there are; replicas beyond take the same ones again, striped."""
BAR_WIDTH = 1000
_LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
_TIER_NAMES = {"accelerator": "Where it computes", "host": "Host memory", "disk": "Disk"}
_REASONS = (
    ("no_shared_prefix", "no shared prefix", "no earlier prompt here began like that"),
    ("shorter_than_a_block", "shorter than a block", "only whole blocks are kept and found again"),
    ("evicted", "evicted", "was in cache and had to leave"),
    ("other_replica", "other replica", "lies in another replica's cache"),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a bar, in thousandths of its width."""

    kind: str
    start: int
    width: int
    mark: Mark | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """What tells a replica from others without reading its name: a letter and a colour."""

    letter: str
    series: int
    striped: bool


@dataclass(frozen=True, slots=True)
class Named:
    """A replica as the record knows it."""

    name: str
    url: str
    engine: str = ""
    """As people know it."""
    beyond: tuple[str, ...] = ()
    """What keeps its KV beside or behind the engine's own memory, as its options ask for it."""


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica's line of the table."""

    replica_id: str
    mark: Mark
    known: Named | None
    member: Mapping[str, Any]
    """Facts of the pool; empty for a replica with memory of its own."""
    load: Mapping[str, Any]
    """What its engine says."""
    bar: tuple[Piece, ...] = ()
    brought_at: int = 0
    age_bar: tuple[Piece, ...] = ()

    @property
    def label(self) -> str:
        """Name, or what there is instead."""
        return self.known.name if self.known else self.replica_id[:8]

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens that its memory holds; `None`: not told."""
        told: int | None = self.load.get("capacity_tokens")
        blocks, size = self.load.get("total_blocks"), self.load.get("block_tokens")
        return told or (blocks * size if blocks and size else None)

    @property
    def used_tokens(self) -> int | None:
        """Of those, by requests that run; `None`: not told."""
        ratio = self.load.get("used_ratio")
        return None if ratio is None or self.capacity_tokens is None else round(ratio * self.capacity_tokens)

    @property
    def moved_words(self) -> str:
        """What went through a connector since its engine started."""
        return connector_words(self.load.get("connector_totals") or {})

    @property
    def host_blocks(self) -> tuple[int, int] | None:
        """Blocks that are used, and that there are, in host memory; `None`: none, or not told."""
        found = [tier for tier in self.load.get("tiers", ()) if tier["name"] == "host"]
        return (found[0]["used_blocks"], found[0]["capacity_blocks"]) if found else None


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool with its replicas."""

    facts: Mapping[str, Any]
    rows: tuple[ReplicaRow, ...]
    first_place: int
    """Places of its replicas among all marks of the page begin after this one."""
    leased_blocks: int
    live_blocks: int
    cached_blocks: int
    borrowed_blocks: int
    lent_blocks: int

    @property
    def leased_ratio(self) -> float | None:
        """Of its capacity."""
        return _ratio(self.leased_blocks, self.facts["capacity_blocks"])

    @property
    def capacity_bytes(self) -> int | None:
        """`None` where nobody told how large a block is."""
        return self.facts["capacity_blocks"] * self.facts["block_bytes"] or None


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier of the replicas of a pool, or of those without one."""

    name: str
    used_blocks: int
    capacity_blocks: int
    bar: tuple[Piece, ...]
    shares: tuple[tuple[Mark, int], ...] = ()
    """Blocks that each replica has there, as the bar shows them."""
    off: tuple[tuple[str, str], ...] = ()
    """(replicas, reason) of those that asked for it and do without."""

    @property
    def used_ratio(self) -> float | None:
        """Of its capacity."""
        return _ratio(self.used_blocks, self.capacity_blocks)


@dataclass(frozen=True, slots=True)
class MissReason:
    """Why prompt tokens were not in cache."""

    name: str
    meaning: str
    tokens: float
    ratio: float | None


@dataclass(frozen=True, slots=True)
class HitView:
    """Prefix cache of all replicas since their engines started."""

    ratio: float | None = None
    query_tokens: float = 0.0
    block_tokens: tuple[int, ...] = ()
    """Effective block sizes: only whole blocks are found again."""
    reasons: tuple[MissReason, ...] = ()
    bar: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class Swaps:
    """What moved between tiers, of all replicas, since their engines started."""

    blocks_in: int = 0
    blocks_out: int = 0
    fetch_waits: int = 0
    checksum_failures: int = 0


@dataclass(frozen=True, slots=True)
class KvView:
    """All of a node."""

    pools: tuple[PoolView, ...] = ()
    alone: tuple[ReplicaRow, ...] = ()
    """Replicas with KV memory of their own."""
    tiers: tuple[TierView, ...] = ()
    hits: HitView = field(default_factory=HitView)
    swaps: Swaps | None = None
    thrashing: tuple[tuple[str, str], ...] = ()
    """(replica, reason) of those that swap nothing now."""

    @property
    def rows(self) -> tuple[ReplicaRow, ...]:
        """All replicas."""
        return (*(row for pool in self.pools for row in pool.rows), *self.alone)


def mark_of(place: int) -> Mark:
    """The mark of the replica in a place, counted from 0. The script of the map does the same."""
    letter = _LETTERS[place % len(_LETTERS)]
    return Mark(letter, place % SERIES + 1, striped=place // SERIES % 2 == 1)


def view_kv(told: Mapping[str, Any] | None, known: Mapping[str, Named]) -> KvView:
    """Arrange what a node reported; `known` are the replicas that the record has there."""
    if told is None:
        return KvView()
    loads: Mapping[str, Mapping[str, Any]] = told["replicas"]
    pools: list[PoolView] = []
    place = 0
    for facts in told["pools"]:
        pools.append(_pool_view(facts, loads, known, place))
        place += len(facts["members"])
    pooled = {member["replica_id"] for facts in told["pools"] for member in facts["members"]}
    alone = [
        ReplicaRow(replica_id, mark_of(place + at), known.get(replica_id), {}, loads[replica_id])
        for at, replica_id in enumerate(sorted(i for i in loads if i not in pooled and _tells_room(loads[i])))
    ]
    rows = [row for pool in pools for row in pool.rows] + alone
    return KvView(
        tuple(pools), tuple(alone), _tiers(pools, alone), _hits(rows), _swaps(rows),
        tuple((row.label, row.load["thrash_reason"]) for row in rows if row.load.get("thrash_reason")),
    )  # fmt: skip


def _tells_room(load: Mapping[str, Any]) -> bool:
    """Whether its engine says how much KV memory it has, in blocks or in tokens."""
    return bool(load["total_blocks"] or load.get("capacity_tokens"))


def _pool_view(
    facts: Mapping[str, Any],
    loads: Mapping[str, Mapping[str, Any]],
    known: Mapping[str, Named],
    first_place: int,
) -> PoolView:
    members: Sequence[Mapping[str, Any]] = facts["members"]
    widest = max((max(m["leased_blocks"], m["brought_blocks"]) for m in members), default=0) or 1
    rows = tuple(
        ReplicaRow(
            member["replica_id"],
            mark_of(first_place + at),
            known.get(member["replica_id"]),
            member,
            loads.get(member["replica_id"], {}),
            _lease_bar(member, widest),
            round(BAR_WIDTH * member["brought_blocks"] / widest),
            _pieces([(f"age{n}", b) for n, b in enumerate(member["cached_by_age_blocks"], 1)]),
        )
        for at, member in enumerate(members)
    )

    def total(name: str) -> int:
        return sum(member[name] for member in members)

    return PoolView(
        facts, rows, first_place, total("leased_blocks"), total("live_blocks"), total("cached_blocks"),
        total("borrowed_blocks"), total("lent_blocks"),
    )  # fmt: skip


def _lease_bar(member: Mapping[str, Any], widest: int) -> tuple[Piece, ...]:
    """What a replica holds, by what lies in it; and what it brought and lends."""
    live, cached = member["live_blocks"], member["cached_blocks"]
    empty = max(0, member["leased_blocks"] - live - cached)
    parts = [("live", live), ("cached", cached), ("hollow", empty), ("lent", member["lent_blocks"])]
    return _pieces(parts, widest)


def _pieces(
    parts: Iterable[tuple[str, float]], whole: float | None = None, marks: Sequence[Mark] = ()
) -> tuple[Piece, ...]:
    """Lay parts side by side; those of nothing are left out."""
    listed = list(parts)
    whole = whole or sum(amount for _, amount in listed) or 1
    pieces, start = [], 0.0
    for at, (kind, amount) in enumerate(listed):
        end = start + amount
        left, right = (min(BAR_WIDTH, round(BAR_WIDTH * edge / whole)) for edge in (start, end))
        if right > left:
            pieces.append(Piece(kind, left, right - left, marks[at] if marks else None))
        start = end
    return tuple(pieces)


def _tiers(pools: Sequence[PoolView], alone: Sequence[ReplicaRow]) -> tuple[TierView, ...]:
    """Tiers by pool, whose blocks are of one size; then of the replicas with memory of their own."""
    groups = [
        (f", pool {pool.facts['pool_id'][:8]}", pool.rows, pool.facts["capacity_blocks"]) for pool in pools
    ]
    if alone:
        groups.append((", not pooled", tuple(alone), 0))
    views = [
        view
        for key in _TIER_NAMES
        for what, rows, shared_blocks in groups
        if (view := _tier(key, what if len(groups) > 1 else "", rows, shared_blocks)) is not None
    ]
    return tuple(views)


def _tier(key: str, what: str, rows: Sequence[ReplicaRow], shared_blocks: int) -> TierView | None:
    own = [(row, tier) for row in rows for tier in row.load.get("tiers", ()) if tier["name"] == key]
    if not own:
        return None
    capacity = sum(tier["capacity_blocks"] for _, tier in own)
    if key == "accelerator" and shared_blocks:
        # Each engine of a pool says how far it could grow; together they have what the pool has.
        capacity = min(capacity, shared_blocks)
    bar = _pieces([("used", tier["used_blocks"]) for _, tier in own], capacity, [row.mark for row, _ in own])
    shares = tuple((row.mark, tier["used_blocks"]) for row, tier in own if tier["used_blocks"])
    used = sum(tier["used_blocks"] for _, tier in own)
    return TierView(_TIER_NAMES[key] + what, used, capacity, bar, shares, _off(own))


def _off(own: Sequence[tuple[ReplicaRow, Mapping[str, Any]]]) -> tuple[tuple[str, str], ...]:
    """Who does without a tier, by reason: a full disk is every replica's."""
    by_reason: dict[str, list[str]] = {}
    for row, tier in own:
        if tier["off_reason"]:
            by_reason.setdefault(tier["off_reason"], []).append(row.label)
    return tuple((", ".join(labels), reason) for reason, labels in by_reason.items())


def _hits(rows: Sequence[ReplicaRow]) -> HitView:
    told = [row.load for row in rows if row.load.get("query_tokens_total") is not None]
    query = sum(load["query_tokens_total"] for load in told)
    hit = sum(load["hit_tokens_total"] or 0.0 for load in told)
    sums = {key: sum(load["miss_tokens_total"].get(key, 0.0) for load in told) for key, _, _ in _REASONS}
    reasons = tuple(
        MissReason(name, meaning, sums[key], _ratio(sums[key], query))
        for key, name, meaning in _REASONS
        if sums[key] or any(key in load["miss_tokens_total"] for load in told)
    )
    sizes = {load["block_tokens"] for load in told if load["block_tokens"]}
    bar = _pieces([("hit", hit), *((f"miss{n}", sums[key]) for n, (key, _, _) in enumerate(_REASONS, 1))])
    return HitView(_ratio(hit, query), query, tuple(sorted(sizes)), reasons, bar if query else ())


def _swaps(rows: Sequence[ReplicaRow]) -> Swaps | None:
    told = [row.load["swaps"] for row in rows if row.load.get("swaps")]
    if not told:
        return None
    names = ("blocks_in", "blocks_out", "fetch_waits", "checksum_failures")
    return Swaps(**{name: sum(swap[name] for swap in told) for name in names})


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
