"""Which conversations move to another replica between their turns, and why the others stay. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from exaserve_ops.sessions.domain.relocation import (
    ACTIVE_SECONDS,
    ASKED,
    BALANCE,
    LEAVING,
    TRANSFER,
    Budget,
    Estimate,
    FleetSessions,
    HeldSession,
    Holder,
    Rates,
    Relocation,
    RelocationPlan,
    ReplicaRoom,
    Stay,
    Thresholds,
    estimate_move,
    is_full,
)

_SAME_RACK_PENALTY = 0.02
_FAR_PENALTY = 0.05
"""How much fuller a nearer target may be: KV over a network costs more than over shared memory."""
_UNKNOWN_CAPACITY_TOKENS = 1 << 20
"""Taken where no replica of a deployment tells: all alike, they are filled evenly."""
_ROUNDING = 1e-9
_MOST_TRIED = 64
"""Replicas that one plan tries in vain to relieve, in one deployment."""
_NO_OTHER = "no other replica of its deployment"


def plan_relocations(fleet: FleetSessions, budget: Budget) -> RelocationPlan:
    """Choose the moves to begin now.

    Asked moves come first, then those off replicas that leave (most recently used conversations
    first: they are back soonest), then balance. Deterministic; ties go by name.
    """
    return _Planner(fleet, budget).plan()


@dataclass(slots=True)
class _Allowance:
    """What of the budget is left while a plan is made."""

    budget: Budget
    bytes_left: int
    fleet_moves: int
    node_moves: Counter[str] = field(default_factory=Counter)

    def refusal(self, nodes: Collection[str], kv_bytes: int) -> str:
        """Why no further move of this size may begin between these nodes; empty if it may."""
        if self.fleet_moves >= self.budget.moves_per_fleet:
            return f"{self.fleet_moves} moves are under way in the fleet, as many as may be"
        busy = next(
            (node for node in sorted(nodes) if self.node_moves[node] >= self.budget.moves_per_node), ""
        )
        if busy:
            return f"{self.node_moves[busy]} moves are under way on its source's or target's node"
        is_alone = self.bytes_left >= self.budget.bytes_full
        if kv_bytes > self.bytes_left and not is_alone:
            return "the limit of bytes per second is used up for now"
        return ""

    def take(self, nodes: Collection[str], kv_bytes: int) -> None:
        self.fleet_moves += 1
        self.bytes_left -= kv_bytes
        self.node_moves.update(nodes)


class _Planner:
    """One plan in the making: pressures change as moves are chosen."""

    def __init__(self, fleet: FleetSessions, budget: Budget) -> None:
        self._fleet = fleet
        self._holders = {holder.replica_id: holder for holder in fleet.holders}
        self._able: defaultdict[str, list[Holder]] = defaultdict(list)
        """Holders that may be given conversations, by deployment."""
        for holder in fleet.holders:
            if holder.accepts and not holder.leaves:
                self._able[holder.deployment].append(holder)
        self._rates = dict(fleet.rates)
        self._allowance = _Allowance(budget, budget.bytes_available, 0)
        self._returns = {(m.target_id, m.source_id): m.seconds_ago for m in fleet.levelled}
        """Source and target of moves that would take back what balance did, with how long ago that was."""
        self._moving = {move.session_id for move in fleet.underway}
        self._tokens = Counter({holder.replica_id: holder.active_tokens for holder in fleet.holders})
        self._sessions: defaultdict[str, list[HeldSession]] = defaultdict(list)
        self._moves: list[Relocation] = []
        self._stays: list[Stay] = []
        for move in fleet.underway:
            self._allowance.take(self._nodes(move.source_id, move.target_id), 0)
            # What is on its way counts where it goes, or the same gap would be closed twice.
            self._shift(move.active_tokens, move.source_id, move.target_id)
        for session in fleet.sessions:
            self._sessions[session.replica_id].append(session)

    def plan(self) -> RelocationPlan:
        known = [(h.replica_id, p) for h in self._fleet.holders if (p := self._pressure(h)) is not None]
        pressures = tuple(sorted(known, key=lambda pair: (-pair[1], pair[0])))
        self._move_asked()
        self._move_leaving()
        balancing, notes = self._balance()
        return RelocationPlan(tuple(self._moves), tuple(self._stays), balancing, pressures, notes)

    # -- moves that must be --------------------------------------------------------------------------
    def _move_asked(self) -> None:
        asked = [s for s in self._fleet.sessions if s.asked_target and s.asked_target != s.replica_id]
        for session in sorted(asked, key=lambda s: s.session_id):
            target = self._holders.get(session.asked_target)
            source = self._holders.get(session.replica_id)
            if target is None or not target.accepts or target.leaves:
                self._stay(session, "the replica that was asked for takes no conversations now")
            elif source is not None and source.deployment != target.deployment:
                self._stay(session, "the replica that was asked for serves another deployment")
            else:
                self._try(session, target, "an operator asked for it", ASKED)

    def _move_leaving(self) -> None:
        leaving = [holder for holder in self._fleet.holders if holder.leaves]
        sessions = [s for holder in leaving for s in self._sessions[holder.replica_id]]
        sessions.sort(key=lambda s: (s.idle_seconds, s.session_id))
        for session in sessions:
            if session.session_id in self._moving or session.asked_target:
                continue
            source = self._holders[session.replica_id]
            if refusal := self._allowance.refusal({source.node_id}, 0):
                self._stay(session, refusal)
                continue  # without looking for a target: there may be tens of thousands of them
            target = self._best_target(session, self._allowed(source))
            if target is None:
                others = "none of the replicas it may go to" if source.leave_to else _NO_OTHER
                self._stay(session, f"{others} takes conversations now")
            else:
                self._try(session, target, source.leaves, LEAVING)

    def _allowed(self, source: Holder) -> list[Holder]:
        able = self._able[source.deployment]
        return [h for h in able if not source.leave_to or h.replica_id in source.leave_to]

    # -- balance -------------------------------------------------------------------------------------
    def _balance(self) -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
        limits = dict(self._fleet.thresholds)
        groups: defaultdict[tuple[str, str], list[Holder]] = defaultdict(list)
        for holder in self._fleet.holders:
            if holder.deployment in limits and not holder.leaves and self._pressure(holder) is not None:
                groups[holder.deployment, holder.release].append(holder)
        notes: defaultdict[str, list[str]] = defaultdict(list)
        for (deployment, _), holders in sorted(groups.items()):
            was_on = deployment in self._fleet.balancing
            note = self._level(holders, limits[deployment], was_on=was_on)
            if note:
                notes[deployment].append(note)
        told = tuple((deployment, "; ".join(some)) for deployment, some in notes.items())
        return frozenset(notes), told

    def _level(self, holders: Sequence[Holder], limits: Thresholds, *, was_on: bool) -> str:
        """Move conversations off the fullest until the gap is small. Returns why, if it was not before."""
        fullest, gap = self._gap(holders)
        starts = self._is_full(fullest, limits) and gap >= limits.start_gap_ratio
        goes_on = was_on and (gap > limits.stop_gap_ratio or self._is_moving(holders))
        if not (starts or goes_on):
            return ""
        full, less = f"{self._pressure_of(fullest):.0%}", f"{100 * gap:.0f}"
        note = f"the fullest replica is {full} full, another {less} points less"
        begun, left = len(self._moves), list(holders)
        while left and len(holders) - len(left) < _MOST_TRIED:
            fullest, gap = self._gap(left, holders)
            if gap <= limits.stop_gap_ratio:
                break
            if not self._relieve(fullest, limits):
                left.remove(fullest)
        if len(self._moves) > begun:
            return note
        waits = "moves are under way" if self._is_moving(holders) else "nothing may move for that now"
        return f"{note}; {waits}"

    def _is_moving(self, holders: Sequence[Holder]) -> bool:
        """Whether moves are under way: they may yet be dropped, and so they do not end it."""
        ids = {holder.replica_id for holder in holders}
        return any(move.source_id in ids for move in self._fleet.underway)

    def _is_full(self, holder: Holder, limits: Thresholds) -> bool:
        room = ReplicaRoom(holder.kv_capacity_tokens, holder.kv_used_ratio, holder.requests_waiting)
        return is_full(self._tokens[holder.replica_id], room, limits)

    def _relieve(self, source: Holder, limits: Thresholds) -> bool:
        """Begin the largest move off `source` that does not turn the imbalance round."""
        if self._allowance.refusal({source.node_id}, 0):
            return False
        able = [h for h in self._able[source.deployment] if self._has_room(source, h, limits)]
        able = [h for h in able if h.release == source.release]
        here = self._pressure_of(source)
        for session in sorted(self._movable(source, limits), key=lambda s: (-s.context_tokens, s.session_id)):
            target = self._best_target(session, able)
            if (
                target is None
                or self._pressure_with(target, session) > here - _share(session, source) + _ROUNDING
            ):
                continue  # it would only turn the imbalance round
            if self._estimate(session, source, target).way != TRANSFER:
                continue  # it would cost more than it gains
            there = self._pressure_of(target)
            why = f"its replica is {here:.0%} full of active sessions, the target {there:.0%}"
            if self._try(session, target, why, BALANCE, quietly=True):
                return True
        return False

    def _has_room(self, source: Holder, target: Holder, limits: Thresholds) -> bool:
        """Whether balance may give it something: it has room, and gave the source nothing of late."""
        if not target.kv_capacity_tokens or target.requests_waiting:
            return False
        if (target.kv_used_ratio or 0.0) >= limits.start_pressure:
            return False
        took_ago = self._returns.get((source.replica_id, target.replica_id), limits.return_seconds)
        return took_ago >= limits.return_seconds and not self._allowance.refusal({target.node_id}, 0)

    def _movable(self, source: Holder, limits: Thresholds) -> Iterable[HeldSession]:
        for session in self._sessions[source.replica_id]:
            rested = session.moved_seconds_ago is None or session.moved_seconds_ago >= limits.rest_seconds
            settled = limits.settle_seconds <= session.idle_seconds <= ACTIVE_SECONDS
            idle = not session.in_turn and session.session_id not in self._moving
            returns = session.turns >= limits.least_turns and session.context_tokens > 0
            if idle and rested and settled and returns and not session.asked_target:
                yield session

    def _gap(self, sources: Sequence[Holder], among: Sequence[Holder] = ()) -> tuple[Holder, float]:
        """The fullest of `sources`, and how much emptier the emptiest is that accepts."""
        fullest = max(sources, key=lambda h: (self._pressure_of(h), h.replica_id))
        most = self._pressure_of(fullest)
        able = [self._pressure_of(h) for h in among or sources if h.accepts and h is not fullest]
        return fullest, (most - min(able, default=most)) / max(1.0, most)

    # -- one move ------------------------------------------------------------------------------------
    def _best_target(self, session: HeldSession, able: Sequence[Holder]) -> Holder | None:
        """The one that is emptiest with it, with something in favour of near ones."""
        source = self._holders[session.replica_id]
        ranked = [
            (self._pressure_with(holder, session) + _distance(source, holder), holder.replica_id, holder)
            for holder in able
            if holder.replica_id != source.replica_id
        ]
        return min(ranked, key=lambda entry: entry[:2])[2] if ranked else None

    def _try(
        self, session: HeldSession, target: Holder, why: str, trigger: str, *, quietly: bool = False
    ) -> bool:
        """Begin a move if the conversation is at rest and the budget has room; else note why not."""
        source = self._holders.get(session.replica_id)
        estimate = self._estimate(session, source, target)
        nodes = self._nodes(session.replica_id, target.replica_id)
        refusal = self._allowance.refusal(nodes, estimate.kv_bytes)
        if session.session_id in self._moving:
            refusal = "it is on its way already"
        elif session.in_turn:
            refusal = "a turn runs; it moves when that has ended"
        if refusal:
            if not quietly:
                self._stay(session, refusal)
            return False
        self._allowance.take(nodes, estimate.kv_bytes)
        self._moving.add(session.session_id)
        if session.idle_seconds <= ACTIVE_SECONDS:
            self._shift(session.context_tokens, session.replica_id, target.replica_id)
        self._moves.append(
            Relocation(
                session.session_id,
                session.replica_id,
                target.replica_id,
                session.owner_epoch,
                session.context_tokens,
                estimate,
                why,
                trigger,
            )
        )
        return True

    def _shift(self, tokens: int, source_id: str, target_id: str) -> None:
        # A count that its replica's sum does not have yet must not make the replica look emptier than empty.
        self._tokens[source_id] = max(0, self._tokens[source_id] - tokens)
        self._tokens[target_id] += tokens

    def _estimate(self, session: HeldSession, source: Holder | None, target: Holder) -> Estimate:
        rates = self._rates.get(target.deployment, Rates(0))
        return estimate_move(
            session.context_tokens,
            rates,
            same_node=source is not None and source.node_id == target.node_id,
            same_layout=source is not None and source.kv_layout == target.kv_layout != "",
            knows_text=source is not None and source.knows_text and target.knows_text,
        )

    def _stay(self, session: HeldSession, why: str) -> None:
        self._stays.append(Stay(session.session_id, session.replica_id, why))

    def _nodes(self, *replica_ids: str) -> set[str]:
        return {self._holders[key].node_id for key in replica_ids if key in self._holders}

    # -- pressures -----------------------------------------------------------------------------------
    def _pressure(self, holder: Holder) -> float | None:
        if not holder.kv_capacity_tokens:
            return None
        return self._tokens[holder.replica_id] / holder.kv_capacity_tokens

    def _pressure_of(self, holder: Holder) -> float:
        return self._pressure(holder) or 0.0

    def _pressure_with(self, holder: Holder, session: HeldSession) -> float:
        """Pressure once it holds the conversation too; one of unknown capacity is taken for a usual one."""
        capacity = holder.kv_capacity_tokens or self._usual_capacity(holder.deployment)
        return (self._tokens[holder.replica_id] + session.context_tokens) / capacity

    def _usual_capacity(self, deployment: str) -> float:
        able = self._able[deployment]
        known = [h.kv_capacity_tokens for h in able if h.kv_capacity_tokens]
        return sum(known) / len(known) if known else _UNKNOWN_CAPACITY_TOKENS


def _share(session: HeldSession, holder: Holder) -> float:
    """What the conversation takes of the replica's KV."""
    return session.context_tokens / (holder.kv_capacity_tokens or 1)


def _distance(source: Holder, target: Holder) -> float:
    if source.node_id == target.node_id:
        return 0.0
    return _SAME_RACK_PENALTY if source.rack and source.rack == target.rack else _FAR_PENALTY
