"""From what clients saw to figures. Pure. All times are seconds of one monotonic clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.killing.load import Seen

WINDOW_SECONDS = 3.0
"""Requests that begin so soon after a kill are looked at for delay; none of them says what is usual."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: what was killed, when, and the replicas that died of it."""

    kind: str
    at: float
    replica_ids: frozenset[str] = frozenset()


def quantile(values: Iterable[float], share: float) -> float | None:
    """Nearest-rank quantile in milliseconds; `None` of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return round(1000 * ordered[max(0, math.ceil(share * len(ordered)) - 1)], 1)


def summarize(kind: str, kills: Sequence[Kill], seen: Sequence[Seen]) -> dict[str, Any]:
    """Figures of all kills of one kind, of which `kills` has those of other kinds, too."""
    ours = [kill for kill in kills if kill.kind == kind]
    open_then = [one for kill in ours for one in seen if one.started_at < kill.at <= one.ended_at]
    soon_after = [one for kill in ours for one in seen if 0 <= one.started_at - kill.at < WINDOW_SECONDS]
    moved = [
        (kill, one)
        for kill in ours
        for one in seen
        if one.is_stream and not one.error and _was_cut(one, kill)
    ]
    gaps = [_gap(kill, one) for kill, one in moved]
    usual = [one for one in seen if not one.error and not any(_is_near(one, kill) for kill in kills)]
    first = sorted(one.pieces_at[0] - one.started_at for one in usual if one.pieces_at)
    prefill = first[len(first) // 2] if first else None
    touched = [one for one in (*open_then, *soon_after) if not one.error]
    late = [
        one.ended_at - one.started_at - typical
        for one in touched
        if (typical := _typical(usual, is_stream=one.is_stream)) is not None
    ]
    return {
        "kills": len(ours),
        "open_requests": len(open_then),
        "failed_streams": sum(one.is_stream and bool(one.error) for one in open_then),
        "failed_plain": sum(not one.is_stream and bool(one.error) for one in open_then),
        "failed_new": sum(bool(one.error) for one in soon_after),
        "sent_again_by_clients": sum(one.tries - 1 for one in (*open_then, *soon_after)),
        "late_p50_ms": quantile(late, 0.5),
        "late_p99_ms": quantile(late, 0.99),
        "late_max_ms": quantile(late, 1.0),
        "moved_streams": len(moved),
        "moved_gap_p50_ms": quantile(gaps, 0.5),
        "moved_gap_max_ms": quantile(gaps, 1.0),
        "usual_first_token_p50_ms": None if prefill is None else round(1000 * prefill, 1),
        "lost_beyond_prefill_p50_ms": quantile([gap - (prefill or 0) for gap in gaps], 0.5),
        "lost_beyond_prefill_max_ms": quantile([gap - (prefill or 0) for gap in gaps], 1.0),
        "errors": sorted({one.error for one in (*open_then, *soon_after) if one.error})[:5],
    }


def _was_cut(one: Seen, kill: Kill) -> bool:
    """Whether its replica died while it gave text."""
    if one.replica_id not in kill.replica_ids or not one.pieces_at:
        return False
    return one.pieces_at[0] <= kill.at < one.pieces_at[-1]


def _gap(kill: Kill, one: Seen) -> float:
    """From the kill to the next piece by another replica: the longest pause from the kill on."""
    before = max(at for at in one.pieces_at if at <= kill.at)
    times = [before, *(at for at in one.pieces_at if at > kill.at)]
    place = max(range(len(times) - 1), key=lambda number: times[number + 1] - times[number])
    return times[place + 1] - max(times[place], kill.at)


def _is_near(one: Seen, kill: Kill) -> bool:
    return one.started_at < kill.at + WINDOW_SECONDS and one.ended_at > kill.at


def _typical(usual: Sequence[Seen], *, is_stream: bool) -> float | None:
    took = sorted(one.ended_at - one.started_at for one in usual if one.is_stream is is_stream)
    return took[len(took) // 2] if took else None
