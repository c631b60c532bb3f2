"""Who may hold how much of a node's pool: a pure function of what each replica holds and needs.

All counts are extents. Three rules, in this order:

1. A replica gets what it needs up to its guaranteed minimum, even if others must set requests back.
2. What is left is shared so that the smallest share is as large as can be (max-min fairness), up to
   what each needs and to its ceiling. Those above their share give back cached and empty extents,
   and others as their requests end; nothing is set back for this rule.
3. What nobody needs may be kept, and taken, for caches.

A guarantee is a right, not a reservation: as long as its owner needs less, the rest is lent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """One replica of the pool."""

    slot: int
    minimum: int
    """Guaranteed as soon as it is needed."""
    ceiling: int
    """Never exceeded, whatever is free."""
    leased: int
    live: int
    """Extents that its running requests would fill if packed."""
    needed: int
    """Live ones and those that its waiting requests would fill."""

    @property
    def useful(self) -> int:
        """What it needs and may have."""
        return min(max(self.needed, self.live), self.ceiling)

    @property
    def floor(self) -> int:
        """Part of its need that is guaranteed."""
        return min(self.useful, self.minimum)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rules say for one replica."""

    slot: int
    target: int
    """Its share as of now, never more than it needs."""
    give_back: int
    """To be returned as soon as that is possible without setting a request back."""
    preempt: int
    """Part of `give_back` for which requests must be set back: somebody is below a guarantee."""
    reason: str


@dataclass(frozen=True, slots=True)
class Grant:
    """What a replica that asks may take now, and why not more."""

    extents: int
    reason: str = ""


def decide(capacity: int, members: Sequence[Member]) -> tuple[Verdict, ...]:
    """Return a verdict for each member, in their order."""
    targets = share_out(capacity, members)
    over = sum(m.leased for m in members) - capacity
    short = sum(max(0, target - m.leased) for target, m in zip(targets, members, strict=True))
    guarantee_short = sum(max(0, m.floor - m.leased) for m in members)
    excess = [max(0, m.leased - target) for target, m in zip(targets, members, strict=True)]
    # What holds no running request costs least and goes first.
    cheap = [min(e, max(0, m.leased - m.live)) for e, m in zip(excess, members, strict=True)]
    dear = [e - c for e, c in zip(excess, cheap, strict=True)]
    recall = max(0, short + over)
    from_cheap = _take_from_largest(cheap, min(recall, sum(cheap)))
    from_dear = _take_from_largest(dear, max(0, recall - sum(cheap)))
    must = max(0, guarantee_short + over - sum(from_cheap))
    preempt = _take_from_largest(from_dear, min(must, sum(from_dear)))
    return tuple(
        Verdict(
            m.slot, targets[i], from_cheap[i] + from_dear[i], preempt[i], _reason(m, targets[i], preempt[i])
        )
        for i, m in enumerate(members)
    )


def grant(capacity: int, members: Sequence[Member], slot: int, asked: int) -> Grant:
    """Return how much of what it asks for a member may take at once."""
    targets = share_out(capacity, members)
    index = next(i for i, m in enumerate(members) if m.slot == slot)
    me, others = members[index], [m for m in members if m.slot != slot]
    free = capacity - sum(m.leased for m in members)
    if me.leased >= me.ceiling:
        return Grant(0, f"at its ceiling of {me.ceiling} extents")
    if free <= 0:
        return Grant(0, "the node's pool is lent out")
    guaranteed = sum(max(0, m.floor - m.leased) for m in others)
    promised = sum(
        max(0, target - m.leased) for target, m in zip(targets, members, strict=True) if m.slot != slot
    )
    due = max(0, targets[index] - me.leased)
    within_guarantee = min(max(0, me.floor - me.leased), free)
    within_share = min(due, max(within_guarantee, free - guaranteed))
    spare = max(0, free - promised - due)
    most = min(asked, within_share + spare, me.ceiling - me.leased)
    reason = "" if most == asked else f"{free} extents are free, {promised} of them promised to others"
    return Grant(max(0, most), reason)


def share_out(capacity: int, members: Sequence[Member]) -> list[int]:
    """Return each member's fair share: its floor first, then level by level up to its need."""
    floors = [m.floor for m in members]
    if sum(floors) > capacity:
        return _raise_level(capacity, [0] * len(members), floors, lambda i: members[i].leased)
    return _raise_level(capacity, floors, [m.useful for m in members], lambda i: members[i].leased)


def idle_surplus(*, leased: int, minimum: int, recent_peak: int, slack: int = 1) -> int:
    """Return how many extents are to be returned for want of use.

    `recent_peak` is the most that was in use within a while; one that was used lately, one in
    reserve and the guaranteed ones are kept, so that a steady load never gives and takes in turns.
    """
    return max(0, leased - max(minimum, recent_peak + slack))


def _raise_level(
    capacity: int, lows: Sequence[int], highs: Sequence[int], held: Callable[[int], int]
) -> list[int]:
    """Return amounts between lows and highs, the smallest as large as can be, within capacity."""
    level, top = 0, max(highs, default=0)
    while level < top:  # the highest level that fits, by halving
        middle = (level + top + 1) // 2
        if sum(_clamp(middle, low, high) for low, high in zip(lows, highs, strict=True)) <= capacity:
            level = middle
        else:
            top = middle - 1
    amounts = [_clamp(level, low, high) for low, high in zip(lows, highs, strict=True)]
    left = capacity - sum(amounts)
    growing = [i for i, a in enumerate(amounts) if a < highs[i] and a == level]
    # Whoever holds the odd one already keeps it: at equal claims nothing moves.
    for index in sorted(growing, key=lambda i: (held(i) <= level, i))[: max(0, left)]:
        amounts[index] += 1
    return amounts


def _take_from_largest(stocks: Sequence[int], total: int) -> list[int]:
    """Return what to take from each stock so that the largest remainders get as small as can be."""
    kept = _raise_level(sum(stocks) - total, [0] * len(stocks), stocks, lambda _: 0)
    return [stock - keep for stock, keep in zip(stocks, kept, strict=True)]


def _clamp(level: int, low: int, high: int) -> int:
    return max(low, min(level, high))


def _reason(member: Member, target: int, preempt: int) -> str:
    if preempt:
        return "another replica is below what it is guaranteed"
    if member.leased > target:
        return "above its share while another replica waits" if target else "needs none at present"
    if member.leased < member.floor:
        return "below what it is guaranteed"
    return "below its share" if member.leased < target else "has its share"
