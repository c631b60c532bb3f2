"""What is wrong with a replica, who takes its place, and when healing rather waits. Pure.

An agent restarts what crashes by itself. What is left for the fleet: replicas that their agent gave
up, whose node is gone or shall be emptied, whose memory somebody else holds, and slow ones. Each gets
one replacement elsewhere and is let go once that one is ready; if it recovers first, the other one is
superfluous and the count of the wish settles it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import DeploymentSnapshot, ReplicaFacts
from exaserve_ops.serving.domain.placement import (
    PlacementBoard,
    PlacementRequest,
    Refusal,
)
from exaserve_ops.serving.domain.steps import Hold, LetGo, Quarantine, Replace, Step

NODE_LOST = "node_lost"
NODE_DRAIN = "node_drain"
FAILED = "failed"
HELD = "held"
SLOW = "slow"
ROLLOUT = "rollout"

LIMITED_CAUSES = frozenset({FAILED, HELD, SLOW})
"""Causes that may lie in the replica itself: replacing without end would only spread the trouble."""


@dataclass(frozen=True, slots=True)
class Ailment:
    """Why a replica should be replaced."""

    cause: str
    why: str


def find_ailment(replica: ReplicaFacts, snapshot: DeploymentSnapshot, now: datetime) -> Ailment | None:
    """Return what is wrong with a replica that is kept; `None` where its agent can still help itself."""
    lost = replica.lost_with
    if replica.status == states.UNREACHABLE or (lost is not None and replica.status != states.PENDING):
        return Ailment(NODE_LOST, f"{lost.name if lost else replica.node_name} is gone")
    if replica.roll is not None and replica.emptied is None:
        return Ailment(ROLLOUT, f"it makes way for {replica.roll.name}")
    return _own_ailment(replica, snapshot, now)


def _own_ailment(replica: ReplicaFacts, snapshot: DeploymentSnapshot, now: datetime) -> Ailment | None:
    emptied, name = replica.emptied, replica.node_name
    if replica.status == states.FAILED:
        return Ailment(FAILED, f"it failed for good on {name}")
    if _is_held(replica, snapshot, now):
        pids = ", ".join(map(str, replica.held_by_pids[:4]))
        return Ailment(HELD, f"its memory on {name} is held by pid {pids}")
    if emptied is not None and replica.status != states.PENDING:
        return Ailment(NODE_DRAIN, f"{emptied.name} is being emptied: {emptied.draining}")
    if replica.slow_reason and snapshot.healing.drain_slow and replica.status == states.READY:
        return Ailment(SLOW, replica.slow_reason)
    return None


def find_ailments(
    replicas: Iterable[ReplicaFacts], snapshot: DeploymentSnapshot, now: datetime
) -> dict[str, Ailment]:
    """Ailments of those that have one, by replica id."""
    found = ((r.id, find_ailment(r, snapshot, now)) for r in replicas if not _is_well(r))
    return {replica_id: ailment for replica_id, ailment in found if ailment is not None}


def _is_well(replica: ReplicaFacts) -> bool:
    """What is so of nearly all, nearly always; of thousands only the others are looked at closely."""
    calm = replica.status == states.READY and replica.roll is None and not replica.slow_reason
    return calm and replica.emptied is None and replica.lost_with is None


def find_cover(replicas: Iterable[ReplicaFacts], ailments: Mapping[str, Ailment]) -> dict[str, ReplicaFacts]:
    """Who takes the place of whom: the replacement of each ailing replica that has one."""
    return {r.replaces: r for r in replicas if r.replaces in ailments}


def plan_quarantine(
    replicas: Iterable[ReplicaFacts], snapshot: DeploymentSnapshot, ailments: Mapping[str, Ailment]
) -> list[Quarantine]:
    """Take accelerators out of use whose memory stays held."""
    if not any(ailment.cause == HELD for ailment in ailments.values()):
        return []
    free = {a.uuid for node in snapshot.nodes for a in node.accelerators if not a.quarantine}
    steps = []
    for replica in replicas:
        ailment = ailments.get(replica.id)
        held = tuple(uuid for uuid in replica.accelerator_uuids if uuid in free)
        if held and ailment is not None and ailment.cause == HELD:
            steps.append(Quarantine(replica.id, held, f"{ailment.why}; {replica.name} could not start"))
    return steps


@dataclass(slots=True)
class Healing:
    """One pass over the ailing replicas of a deployment; collects steps and what they reserve."""

    snapshot: DeploymentSnapshot
    ailments: Mapping[str, Ailment]
    cover: Mapping[str, ReplicaFacts]
    board: PlacementBoard
    """Where there is room; what is placed takes it."""
    holds: dict[str, str]
    """Why each one that is not healed now is not; filled by `plan`."""
    refusals: dict[PlacementRequest, str] = field(default_factory=dict)
    """What is said of requests that have no room: the same for all that ask for the same."""

    def plan(self, kept: Iterable[ReplicaFacts]) -> list[Step]:
        """Return the steps for those that ail, and the holds that are new or over."""
        kept = tuple(kept)
        steps: list[Step] = []
        ailing = [replica for replica in kept if replica.id in self.ailments]
        budget = self._budget(ailing)
        for replica in ailing:
            step = self._heal(replica, budget)
            if isinstance(step, Hold):
                self.holds[replica.id] = step.why
            elif step is not None:
                steps.append(step)
        return steps + self._news(kept)

    def _heal(self, replica: ReplicaFacts, budget: _Budget) -> Step | None:
        ailment = self.ailments.get(replica.id)
        if ailment is None:
            return None
        if self.snapshot.healing.frozen and ailment.cause != NODE_DRAIN:
            return Hold(replica.id, f"healing is frozen: {self.snapshot.healing.frozen}")
        if ailment.cause == NODE_LOST and replica.others:
            # Its other members hold what the next one needs, and answer nobody without the one that is gone.
            return LetGo(replica.id, "stop", f"{ailment.why}, and with it a part of the whole")
        successor = self.cover.get(replica.id)
        if successor is not None:
            return _make_way(replica, ailment, successor)
        return self._uncovered(replica, ailment, budget)

    def _uncovered(self, replica: ReplicaFacts, ailment: Ailment, budget: _Budget) -> Step:
        if self._is_useless_cover(replica):
            return LetGo(replica.id, "stop", f"{ailment.why}, before it could take a place")
        if _drain_is_over(replica, ailment):
            return release(replica, f"{ailment.why} and no time is left")
        if ailment.cause == ROLLOUT:
            return self._roll(replica, ailment, budget)
        return self._replace(replica, ailment, budget)

    def _roll(self, replica: ReplicaFacts, ailment: Ailment, budget: _Budget) -> Step:
        """A rollout says when and how; one that serves nobody need not wait for its successor."""
        target = replica.next_release
        if target != self.snapshot.release and target in self.snapshot.healing.failed_releases:
            return Hold(replica.id, f"{ailment.why}, of which a replica failed lately: no other is tried now")
        if replica.status == states.READY and not (replica.roll and replica.roll.in_place):
            return self._replace(replica, ailment, budget)
        return replace(release(replica, f"{ailment.why}, which follows in its place"), successor=target)

    def _is_useless_cover(self, replica: ReplicaFacts) -> bool:
        """A replacement that ails itself makes way for another one, so that no chain grows."""
        return replica.replaces in self.ailments and replica.status != states.READY

    def _replace(self, replica: ReplicaFacts, ailment: Ailment, budget: _Budget) -> Step:
        refusal = budget.refusal(replica, ailment)
        if refusal:
            return Hold(replica.id, refusal)
        request = self._request(replica, ailment)
        choice = self.refusals.get(request) or self.board.place_as(request)
        if isinstance(choice, Refusal):
            choice = self.refusals[request] = choice.summary()
        if isinstance(choice, str):
            return Hold(replica.id, f"{ailment.why}; no room elsewhere: {choice}")
        budget.spend(replica, ailment)
        why = f"takes the place of {replica.name}: {ailment.why}"
        return Replace(replica.id, choice, replica.role, ailment.cause, why)

    def _request(self, replica: ReplicaFacts, ailment: Ailment) -> PlacementRequest:
        # Of several nodes nobody knows which is to blame: those are shunned, and taken where no others do.
        own = {room.node_id for room in replica.rooms} if ailment.cause in {FAILED, SLOW} else set()
        avoid = set() if replica.others else own
        if ailment.cause in {FAILED, HELD}:
            avoid |= {node_id for node_id, _ in self.snapshot.healing.failed_nodes}
        return replace(
            self.snapshot.request_of(replica.next_release),
            standby=replica.role == "standby",
            avoid=frozenset(avoid - {""}),
            shun=frozenset(own - avoid),
        )

    def _budget(self, kept: Iterable[ReplicaFacts]) -> _Budget:
        doubled = [
            r for r in kept if r.id in self.cover and _runs(r) and self.ailments[r.id].cause != ROLLOUT
        ]
        slow = sum(self.ailments[r.id].cause == SLOW for r in doubled)
        healing = self.snapshot.healing
        return _Budget(self.snapshot, len(doubled), slow, healing.recent_replacements)

    def _news(self, kept: Iterable[ReplicaFacts]) -> list[Step]:
        """Holds that the record does not have yet: it keeps one row for one change."""
        said = ((r, self.holds.get(r.id, "")) for r in kept)
        return [Hold(replica.id, why) for replica, why in said if replica.healing_note != why]


@dataclass(slots=True)
class _Budget:
    """How much more may be replaced now."""

    snapshot: DeploymentSnapshot
    doubled: int
    """Replicas that run and whose replacement is on its way."""
    slow: int
    recent: int

    def refusal(self, replica: ReplicaFacts, ailment: Ailment) -> str:
        """Why this one must wait; empty where it need not."""
        healing, wanted = self.snapshot.healing, self.snapshot.replicas_wanted
        if ailment.cause in LIMITED_CAUSES:
            failed = sorted({name for _, name in healing.failed_nodes})
            if len(failed) >= healing.policy.failed_nodes_limit:
                return (
                    f"replicas failed on {', '.join(failed)}: replacing them helps nobody; "
                    "change the deployment, or restart one"
                )
            if self.recent >= healing.policy.replacements_limit(wanted):
                return f"{ailment.why}; {self.recent} replacements lately are enough, one more follows later"
        if ailment.cause == SLOW and self.slow:
            return f"{ailment.why}; another slow one is being replaced"
        if ailment.cause == ROLLOUT:
            return ""
        if _runs(replica) and self.doubled >= healing.policy.surge(wanted):
            return f"{ailment.why}; {self.doubled} others are being replaced, this one follows"
        return ""

    def spend(self, replica: ReplicaFacts, ailment: Ailment) -> None:
        """Count a replacement."""
        self.doubled += _runs(replica) and ailment.cause != ROLLOUT
        self.slow += ailment.cause == SLOW
        self.recent += ailment.cause in LIMITED_CAUSES


def release(replica: ReplicaFacts, why: str) -> LetGo:
    """Let a replica go in the way that its status calls for."""
    event = {states.PENDING: "cancel", states.READY: "drain"}.get(replica.status, "stop")
    return LetGo(replica.id, event, why)


def plan_overdue(snapshot: DeploymentSnapshot, now: datetime) -> list[LetGo]:
    """What still ends its open requests on a node whose time to empty is up is stopped."""
    return [
        LetGo(r.id, "stop", f"the time to empty {r.emptied.name} is up", in_order=bool(r.others))
        for r in snapshot.replicas
        if r.status == states.DRAINING and r.wanted == "drain" and r.emptied and r.emptied.drain_is_over
        if not (r.others and _is_out_of_time(r, now))
    ]


def _is_out_of_time(replica: ReplicaFacts, now: datetime) -> bool:
    """Whether its head is being ended already, and the others follow."""
    until = replica.drain_deadline_at
    return replica.is_handed_over and until is not None and until <= now


def _make_way(replica: ReplicaFacts, ailment: Ailment, successor: ReplicaFacts) -> LetGo | None:
    if ailment.cause == ROLLOUT and replica.status == states.READY:
        if replica.roll is not None and replica.roll.in_place:
            # One made while it was away: it may be waiting for just this place.
            return release(replica, f"{ailment.why}; {successor.name} follows")
        return None  # its sessions leave first; the rollout says when it goes
    if successor.status == states.READY and not successor.is_closed:
        return release(replica, f"{ailment.why}; {successor.name} took its place")
    if _drain_is_over(replica, ailment):
        return release(replica, f"{ailment.why} and no time is left; {successor.name} follows")
    return None


def _runs(replica: ReplicaFacts) -> bool:
    return replica.status not in {states.UNREACHABLE, states.FAILED}


def _drain_is_over(replica: ReplicaFacts, ailment: Ailment) -> bool:
    return ailment.cause == NODE_DRAIN and replica.emptied is not None and replica.emptied.drain_is_over


def _is_held(replica: ReplicaFacts, snapshot: DeploymentSnapshot, now: datetime) -> bool:
    if replica.held_since is None or replica.status not in {states.PLACED, states.BACKING_OFF}:
        return False
    return (now - replica.held_since).total_seconds() >= snapshot.healing.policy.held_seconds
