"""What to do so that a deployment becomes what is wanted: a pure plan, with a why for each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.counting import Count
from exaserve_ops.serving.domain.facts import (
    SERVING,
    STANDBY,
    DeploymentSnapshot,
    HealingFacts,
    HealingPolicy,
    ReplicaFacts,
)
from exaserve_ops.serving.domain.healing import (
    Healing,
    find_ailments,
    find_cover,
    plan_overdue,
    plan_quarantine,
)
from exaserve_ops.serving.domain.placement import NodeRoom, PlacementBoard, PlacementRequest, Refusal
from exaserve_ops.serving.domain.standbys import plan_changed_roles, plan_promotions
from exaserve_ops.serving.domain.steps import (
    Create,
    FinishDeletion,
    Hold,
    LetGo,
    Place,
    Plan,
    Promote,
    Quarantine,
    Replace,
    StandDown,
    Step,
    Wait,
)
from exaserve_ops.serving.domain.waiting import find_waiting

__all__ = [
    "Create",
    "DeploymentSnapshot",
    "FinishDeletion",
    "HealingFacts",
    "HealingPolicy",
    "Hold",
    "LetGo",
    "Place",
    "Plan",
    "Promote",
    "Quarantine",
    "Replace",
    "ReplicaFacts",
    "StandDown",
    "Step",
    "Wait",
    "make_plan",
    "plan_deployment",
    "plan_takeover",
]


def plan_deployment(snapshot: DeploymentSnapshot, *, now: datetime) -> tuple[Step, ...]:
    """Compare wish and record, and return the steps in the order in which to take them.

    First come those that bring answers back at once (a standby is promoted), then who stands by from now
    on, who is too many, and then who is healed, placed and made. Nobody who runs is let go while another
    one is made. Those that serve nobody go first when there are too many;
    among the ready, the one with the fewest active sessions, then the newest. Pending replicas are
    placed oldest first.
    """
    return make_plan(snapshot, now=now).steps


def plan_takeover(snapshot: DeploymentSnapshot, *, now: datetime) -> tuple[Promote, ...]:
    """The promotions alone: what cannot wait until a whole plan of a large deployment is made.

    The snapshot may leave out what is ready and serves.
    """
    if snapshot.deleting:
        return ()
    kept = tuple(r for r in snapshot.replicas if r.is_kept)
    cover = find_cover(kept, find_ailments(kept, snapshot, now))
    promotions, _ = plan_promotions(kept, cover, snapshot)
    return tuple(promotions)


def make_plan(snapshot: DeploymentSnapshot, *, now: datetime) -> Plan:
    """Return what `plan_deployment` does, together with everything that is waited for."""
    kept = tuple(r for r in snapshot.replicas if r.is_kept)
    if snapshot.deleting:
        steps = _plan_end(kept, snapshot)
        return Plan(steps, find_waiting(snapshot, {}, {}, steps))
    ailments = find_ailments(kept, snapshot, now)
    promotions, kept = plan_promotions(kept, find_cover(kept, ailments), snapshot)
    changed, kept = plan_changed_roles(kept, find_cover(kept, ailments), snapshot)
    count = Count(kept, find_cover(kept, ailments), snapshot)
    victims = [*count.victims(STANDBY), *count.victims(SERVING)]
    gone = {r.id for r in victims}
    left = [r for r in kept if r.id not in gone]
    quarantines = plan_quarantine(left, snapshot, ailments)
    board = PlacementBoard(snapshot.request, _rooms(snapshot, quarantines))
    cover = find_cover(left, ailments)
    healing = Healing(snapshot, ailments, cover, board, holds={})
    healed = healing.plan(left)
    pending = sorted((r for r in left if r.status == states.PENDING), key=lambda r: (r.created_at, r.name))
    placed = _place(snapshot, pending, board)
    steps = (
        *promotions,
        *changed,
        *(_too_many(r, snapshot) for r in victims),
        *plan_overdue(snapshot, now),
        *quarantines,
        *healed,
        *placed,
        *count.missing(SERVING),
        *count.missing(STANDBY),
    )
    return Plan(steps, find_waiting(snapshot, healing.holds, cover, steps))


def _plan_end(kept: Sequence[ReplicaFacts], snapshot: DeploymentSnapshot) -> tuple[Step, ...]:
    order = Count(tuple(kept), {}, snapshot).rank
    steps: list[Step] = [_too_many(r, snapshot) for r in sorted(kept, key=order)]
    if all(r.status == states.STOPPED for r in snapshot.replicas):
        steps.append(FinishDeletion())
    return tuple(steps)


def _too_many(replica: ReplicaFacts, snapshot: DeploymentSnapshot) -> LetGo:
    wanted = snapshot.wanted(replica.role)
    noun = "standbys" if replica.role == STANDBY else "replicas"
    why = (
        "the deployment is deleted" if snapshot.deleting else f"{wanted} {noun} are wanted, this is one more"
    )
    if replica.status == states.PENDING:
        return LetGo(replica.id, "cancel", why)
    if replica.status == states.READY:
        first = (
            "has a whole card, not a slice; active sessions" if replica.spilled else "fewest active sessions"
        )
        why += f"; {first} ({replica.active_sessions})"
        return LetGo(replica.id, "drain", why)
    return LetGo(replica.id, "stop", f"{why}; it was {replica.status}")


def _rooms(snapshot: DeploymentSnapshot, quarantines: Iterable[Quarantine]) -> Sequence[NodeRoom]:
    rooms: Sequence[NodeRoom] = snapshot.nodes
    for step in quarantines:
        rooms = [room.quarantined(step.accelerator_uuids, step.why) for room in rooms]
    return rooms


def _place(
    snapshot: DeploymentSnapshot, pending: Sequence[ReplicaFacts], board: PlacementBoard
) -> list[Step]:
    """Place what waits; the room on the board shrinks with it."""
    shun = frozenset(node_id for node_id, _ in snapshot.healing.failed_nodes)
    releases = dict.fromkeys(r.release for r in pending)
    requests = {release: replace(snapshot.request_of(release), shun=shun) for release in releases}
    return [
        step
        for release in releases
        for replica in pending
        if replica.release == release
        for step in _place_one(replica, requests[release], board)
    ]


def _place_one(replica: ReplicaFacts, request: PlacementRequest, board: PlacementBoard) -> list[Step]:
    choice = board.place_as(replace(request, standby=replica.role == STANDBY))
    if not isinstance(choice, Refusal):
        return [Place(replica.id, choice)]
    # The same reason again is no news: the record keeps one row for one change.
    return [] if replica.reason == choice.summary() else [Wait(replica.id, choice.summary())]
