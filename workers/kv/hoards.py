"""Who keeps what others are guaranteed: told from an engine that is slow by its giving back nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

AttemptKey: TypeAlias = tuple[str, int]
"""Replica and attempt."""


@dataclass(frozen=True, slots=True)
class Debt:
    """What an attempt holds, and the part of it that others are guaranteed and wait for. Extents."""

    leased: int
    overdue: int


@dataclass(frozen=True, slots=True)
class Hoard:
    """An attempt that has given nothing back of what is overdue."""

    leased: int
    """The least that it held since."""
    seconds: float = 0.0
    """For how long, as far as somebody looked."""


def follow_hoards(
    before: Mapping[AttemptKey, Hoard], debts: Mapping[AttemptKey, Debt], *, passed_seconds: float
) -> dict[AttemptKey, Hoard]:
    """Return the hoards after one more look; whoever gave anything back begins anew."""
    after = {}
    for key, debt in debts.items():
        if debt.overdue <= 0:
            continue
        known = before.get(key)
        if known is None or debt.leased < known.leased:
            after[key] = Hoard(debt.leased)
        else:
            after[key] = Hoard(known.leased, known.seconds + passed_seconds)
    return after
