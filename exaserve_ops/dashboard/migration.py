"""A plan of moves of sessions, with the names that people know, ready for its page."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from exaserve_ops.dashboard import wording
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.sessions.domain.relocation import (
    Estimate,
    FleetSessions,
    Rates,
    RelocationPlan,
    break_even_tokens,
)
from exaserve_ops.sessions.models import InferenceSession

SHOWN = 50
"""Of moves, of what waits, and of replicas; the counts are of all."""
_HOW = {
    (True, False): "KV is sent where that is faster, or else computed at the next turn",
    (True, True): "KV is sent where that is faster, or else computed before the next turn",
    (False, True): "the target computes the context before the next turn",
    (False, False): "the target computes the context at the next turn",
}
"""By whether replicas of a deployment send KV, and whether they know their sessions' text."""


@dataclass(frozen=True, slots=True)
class MoveLine:
    """A session that would move now, or waits."""

    session: InferenceSession | None
    source: Replica | None
    why: str
    target: Replica | None = None
    estimate: Estimate | None = None
    context_tokens: int = 0
    kv_bytes: int = 0
    """Of its context, whether they are sent or not; 0: not known."""


@dataclass(frozen=True, slots=True)
class DeploymentLine:
    """What moves of a deployment's sessions are judged by."""

    deployment: Deployment | None
    rates: Rates
    note: str
    near: str
    """Break-even within a node, in words; empty: not measured yet."""
    across: str
    sends_kv: bool
    """Whether any of its replicas can."""
    how: str
    """What its engines can do for a session that moves, in words."""


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """All that the page shows of a dry run."""

    moves: tuple[MoveLine, ...]
    stays: tuple[MoveLine, ...]
    move_count: int
    stay_count: int
    underway: int
    deployments: tuple[DeploymentLine, ...]
    replicas: tuple[tuple[Replica | None, float], ...]
    """Fullest first, with the tokens of active sessions over the tokens of KV memory."""


def describe_plan(fleet: FleetSessions, plan: RelocationPlan) -> MigrationPlan:
    """Give what is shown of a plan names, in three queries."""
    moves, stays, pressures = plan.moves[:SHOWN], plan.stays[:SHOWN], plan.pressures[:SHOWN]
    keys = {move.session_id for move in moves} | {stay.session_id for stay in stays}
    sessions = {str(pk): row for pk, row in InferenceSession.objects.in_bulk(map(int, keys)).items()}
    places = {key for move in moves for key in (move.source_id, move.target_id)}
    places |= {stay.replica_id for stay in stays} | {key for key, _ in pressures}
    replicas = {str(pk): row for pk, row in Replica.objects.in_bulk(places).items()}
    rates = dict(fleet.rates)
    kv_bytes = {h.replica_id: rates.get(h.deployment, Rates(0)).kv_bytes_per_token for h in fleet.holders}
    return MigrationPlan(
        moves=tuple(
            MoveLine(
                sessions.get(move.session_id),
                replicas.get(move.source_id),
                move.why,
                replicas.get(move.target_id),
                move.estimate,
                move.context_tokens,
                move.context_tokens * kv_bytes.get(move.source_id, 0),
            )
            for move in moves
        ),
        stays=tuple(
            MoveLine(sessions.get(stay.session_id), replicas.get(stay.replica_id), stay.why) for stay in stays
        ),
        move_count=len(plan.moves),
        stay_count=len(plan.stays),
        underway=len(fleet.underway),
        deployments=_deployments(fleet, dict(plan.notes)),
        replicas=tuple((replicas.get(key), pressure) for key, pressure in pressures),
    )


def _deployments(fleet: FleetSessions, notes: dict[str, str]) -> tuple[DeploymentLine, ...]:
    rows = _by_key([key for key, _ in fleet.rates])
    sending = {holder.deployment for holder in fleet.holders if holder.kv_layout}
    telling = {holder.deployment for holder in fleet.holders if holder.knows_text}
    lines = [
        DeploymentLine(
            rows.get(key),
            rates,
            notes.get(key, ""),
            _break_even(rates, same_node=True),
            _break_even(rates, same_node=False),
            key in sending,
            _HOW[key in sending, key in telling],
        )
        for key, rates in fleet.rates
    ]
    return tuple(sorted(lines, key=lambda line: str(line.deployment)))


def _by_key(keys: Collection[str]) -> dict[str, Deployment]:
    return {str(pk): row for pk, row in Deployment.objects.in_bulk(list(keys)).items()}


def _break_even(rates: Rates, *, same_node: bool) -> str:
    tokens = break_even_tokens(rates, same_node=same_node)
    if tokens is None:
        return ""
    if math.isinf(tokens):
        return "never, computing is faster"
    return f"from {wording.number(math.ceil(tokens))} tokens on"
