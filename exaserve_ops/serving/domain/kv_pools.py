"""A node's pools of KV blocks: what agents tell of them, what of that is news, and changed limits. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class PoolMemberFacts(Protocol):
    """One replica in a pool. What an agent's message is decoded into is one already."""

    replica_id: str
    attempt: int
    alive: bool
    leased_blocks: int
    ceiling_blocks: int
    waiting_requests: int
    short_blocks: int


class PoolFacts(Protocol):
    """One pool of a node."""

    pool_id: str
    block_bytes: int
    extent_blocks: int
    free_blocks: int
    damaged_blocks: int
    reclaimed_extents: int

    @property
    def members(self) -> Sequence[PoolMemberFacts]:
        """The replicas that have a place in it."""
        ...


# -- what is news ------------------------------------------------------------------------------------
OUT_OF_BLOCKS, BLOCKS_AGAIN = "kv_out_of_blocks", "kv_blocks_again"
THRASHING, THRASH_OVER = "kv_thrash", "kv_thrash_over"
RECLAIMED, DAMAGED, REPAIRED = "kv_reclaimed", "kv_damaged", "kv_repaired"


_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class WatchPolicy:
    """How long something must last to be told, so that what comes and goes makes one event of each."""

    short_seconds: float = 10.0
    """Requests wait for blocks for longer."""
    enough_seconds: float = 15.0
    thrash_seconds: float = 2.0
    calm_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Flag:
    """Whether something is told as being so, and since when it has looked otherwise."""

    on: bool = False
    otherwise_since: float | None = None

    def follow(self, seen: bool, now: float, *, on_after: float, off_after: float) -> Flag:  # noqa: FBT001 - what was seen
        """The flag after one more look."""
        if seen == self.on:
            return Flag(self.on)
        since = now if self.otherwise_since is None else self.otherwise_since
        if now - since >= (on_after if seen else off_after):
            return Flag(seen)
        return Flag(self.on, since)


_OFF = Flag()


@dataclass(frozen=True, slots=True)
class News:
    """Something worth an event, of the node itself where no replica is named."""

    event: str
    reason: str
    replica_id: str = ""
    about: tuple[str, ...] = ()
    """Replicas that the reason is to name."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """What was last seen of one node."""

    out_of_blocks: Mapping[str, Flag] = field(default_factory=dict)
    thrash: Mapping[str, Flag] = field(default_factory=dict)
    reclaimed: Mapping[str, int] = field(default_factory=dict)
    """Extents by pool; a pool that is new to us begins with what it says."""
    damaged: Mapping[str, int] = field(default_factory=dict)
    holders: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Attempts that hold any blocks, by pool and replica; one that died is among them until it is swept."""


@dataclass(frozen=True, slots=True)
class NodeSight:
    """One look at one node."""

    pools: Sequence[PoolFacts]
    thrash_reasons: Mapping[str, str] = field(default_factory=dict)
    """By replica; empty text: all is well there."""


def follow_node(
    memory: NodeMemory, sight: NodeSight, *, now: float, policy: WatchPolicy
) -> tuple[NodeMemory, tuple[News, ...]]:
    """Compare a look with what was seen before; returns what to remember, and what is news."""
    short, short_news = _follow_shortage(memory.out_of_blocks, sight.pools, now, policy)
    thrash, thrash_news = _follow_thrash(memory.thrash, sight.thrash_reasons, now, policy)
    news = (
        *short_news,
        *thrash_news,
        *_reclaim_news(memory, sight.pools),
        *_damage_news(memory, sight.pools),
    )
    after = NodeMemory(
        short,
        thrash,
        {pool.pool_id: pool.reclaimed_extents for pool in sight.pools},
        {pool.pool_id: pool.damaged_blocks for pool in sight.pools},
        {
            (pool.pool_id, member.replica_id): member.attempt
            for pool in sight.pools
            for member in pool.members
            if member.leased_blocks
        },
    )
    return after, news


def _follow_shortage(
    before: Mapping[str, Flag], pools: Sequence[PoolFacts], now: float, policy: WatchPolicy
) -> tuple[dict[str, Flag], list[News]]:
    flags, news = {}, []
    for pool in pools:
        for member in pool.members:
            was = before.get(member.replica_id, _OFF)
            is_short = member.alive and member.waiting_requests > 0 and member.short_blocks > 0
            flag = was.follow(is_short, now, on_after=policy.short_seconds, off_after=policy.enough_seconds)
            if flag != _OFF:
                flags[member.replica_id] = flag
            if flag.on and not was.on:
                news.append(News(OUT_OF_BLOCKS, _why_short(pool, member, policy), member.replica_id))
            elif was.on and not flag.on:
                news.append(News(BLOCKS_AGAIN, "its requests have the blocks they need", member.replica_id))
    return flags, news


def _why_short(pool: PoolFacts, member: PoolMemberFacts, policy: WatchPolicy) -> str:
    cause = (
        f"it is at its ceiling of {member.ceiling_blocks} blocks"
        if member.leased_blocks >= member.ceiling_blocks
        else f"{pool.free_blocks} blocks of the node's pool are free"
    )
    return (
        f"{member.waiting_requests} requests wait for {member.short_blocks} more blocks"
        f" for more than {policy.short_seconds:g} s: it holds {member.leased_blocks}, and {cause}"
    )


def _follow_thrash(
    before: Mapping[str, Flag], reasons: Mapping[str, str], now: float, policy: WatchPolicy
) -> tuple[dict[str, Flag], list[News]]:
    flags, news = {}, []
    for replica_id, reason in reasons.items():
        was = before.get(replica_id, _OFF)
        flag = was.follow(bool(reason), now, on_after=policy.thrash_seconds, off_after=policy.calm_seconds)
        if flag != _OFF:
            flags[replica_id] = flag
        if flag.on and not was.on:
            news.append(News(THRASHING, reason, replica_id))
        elif was.on and not flag.on:
            news.append(News(THRASH_OVER, "blocks that come back are used before they leave", replica_id))
    return flags, news


def _reclaim_news(memory: NodeMemory, pools: Sequence[PoolFacts]) -> list[News]:
    news = []
    for pool in pools:
        taken = pool.reclaimed_extents - memory.reclaimed.get(pool.pool_id, pool.reclaimed_extents)
        if taken > 0:  # fewer than before: another pool of the same layout
            blocks = taken * pool.extent_blocks
            size = f" ({blocks * pool.block_bytes / _MIB:,.1f} MiB)" if pool.block_bytes else ""
            reason = f"{blocks} blocks{size} are wiped and free again"
            news.append(News(RECLAIMED, reason, about=_dead_holders(memory, pool)))
    return news


def _dead_holders(memory: NodeMemory, pool: PoolFacts) -> tuple[str, ...]:
    """Replicas whose attempt held blocks at the last look and is over now."""
    living = {(member.replica_id, member.attempt) for member in pool.members if member.alive}
    return tuple(
        replica_id
        for (pool_id, replica_id), attempt in memory.holders.items()
        if pool_id == pool.pool_id and (replica_id, attempt) not in living
    )


def _damage_news(memory: NodeMemory, pools: Sequence[PoolFacts]) -> list[News]:
    news = []
    for pool in pools:
        before, now = memory.damaged.get(pool.pool_id, 0), pool.damaged_blocks
        if now > before:
            reason = f"{now} blocks have a damaged record and are lent to nobody until the pool stands empty"
            news.append(News(DAMAGED, reason))
        elif before and not now:
            news.append(News(REPAIRED, f"{before} blocks can be lent again"))
    return news


# -- changed limits ----------------------------------------------------------------------------------
_KIND = "kv-limits"


@dataclass(frozen=True, slots=True)
class LimitsWish:
    """What one replica is to have of its node's pool. Its text is the command's id as well."""

    node_id: str
    replica_id: str
    minimum_blocks: int
    ceiling_blocks: int

    def text(self) -> str:
        """A new wish in words that `parse_limits_wish` reads."""
        limits = f"{self.minimum_blocks}/{self.ceiling_blocks}"
        return f"{_KIND}/{self.node_id}/{self.replica_id}/{limits}/{uuid.uuid4()}"

    def words(self) -> str:
        """The limits, for people."""
        return f"at least {self.minimum_blocks} and at most {self.ceiling_blocks} blocks"


def is_limits_wish(text: str) -> bool:
    """Whether a command's id is that of such a wish."""
    return text.startswith(f"{_KIND}/")


def parse_limits_wish(text: str) -> LimitsWish:
    """Read a wish. Raises `ValueError` for any other text."""
    kind, node_id, replica_id, minimum, ceiling, _ = text.split("/")
    if kind != _KIND:
        raise ValueError(f"{text!r} asks for no limits")
    return LimitsWish(str(uuid.UUID(node_id)), str(uuid.UUID(replica_id)), int(minimum), int(ceiling))
