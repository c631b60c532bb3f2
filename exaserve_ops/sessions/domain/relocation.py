"""Which conversations move to another replica between their turns, and why the others stay. Pure.

A replica's *pressure* is the tokens of the conversations that came back to it lately, over the tokens
that its KV memory holds. Above 1 they evict one another, and each turn computes its whole context
again; what an engine reports as used KV does not show that, since an idle conversation's blocks count
as free. Conversations leave a replica because it leaves (drain, rollout), because somebody asked, or
because its pressure is too far above others'.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

TRANSFER = "transfer"
"""The KV goes along."""
RECOMPUTE = "recompute"
"""Only the affinity moves; the target computes the context when it is told to, or at the next turn."""

_SAME_RACK_PENALTY = 0.02
_FAR_PENALTY = 0.05
"""How much fuller a nearer target may be: KV over a network costs more than over shared memory."""
_NO_OTHER = "no other replica of its deployment"


@dataclass(frozen=True, slots=True)
class Holder:
    """A replica, as a place for conversations."""

    replica_id: str
    node_id: str
    rack: str
    deployment: str
    kv_layout: str
    """KV moves only between equal ones: same weights, element type and block shape."""
    kv_capacity_tokens: int | None
    accepts: bool = True
    """Whether it may be given conversations: ready, not draining, reached."""
    leaves: str = ""
    """Why all of its conversations must go, such as `node n3 drains`; empty where it stays."""
    leave_to: frozenset[str] = frozenset()
    """Replicas that they may go to; empty: any of its deployment."""
    leaves_kv: bool = False
    """Whether what leaves must be computed again wherever it goes, since that has other weights."""


@dataclass(frozen=True, slots=True)
class HeldSession:
    """A conversation and the replica that its next turn would go to."""

    session_id: str
    replica_id: str
    owner_epoch: int
    context_tokens: int
    idle_seconds: float
    """Since its last turn ended."""
    in_turn: bool = False
    moved_seconds_ago: float | None = None
    """`None`: not since anybody remembers."""
    asked_target: str = ""
    """Replica that an operator wants it on."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What moving and computing cost for one deployment, as measured; `None` is not measured yet."""

    kv_bytes_per_token: int
    prefill_tokens_per_second: float | None = None
    same_node_bytes_per_second: float | None = None
    across_bytes_per_second: float | None = None
    fixed_seconds: float = 0.02
    """Of a move without its bytes: preparing the target, and the swap."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may move at once."""

    moves_per_node: int = 2
    moves_per_fleet: int = 32
    bytes_available: int = 1 << 30
    """What the limit of bytes per second has left now."""
    bytes_full: int = 1 << 30
    """What it has after a rest: one move that is larger than this may then go, alone."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When the pressures of a deployment's replicas are levelled, and with what."""

    start_pressure: float = 0.9
    start_gap_ratio: float = 0.3
    """Fullest less emptiest replica."""
    stop_gap_ratio: float = 0.1
    active_seconds: float = 600.0
    """A conversation quiet for longer counts for nothing and is left where it is."""
    settle_seconds: float = 1.0
    """After a turn: a client that sends the next one at once is not raced."""
    rest_seconds: float = 60.0
    """After a move, before balance may move the same conversation again."""


NO_BALANCE = Thresholds(start_pressure=float("inf"))
"""Only what is asked for, and what leaves."""


@dataclass(frozen=True, slots=True)
class Underway:
    """A move that has not ended."""

    session_id: str
    source_id: str
    target_id: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a move costs, and which way is cheaper."""

    kv_bytes: int
    transfer_seconds: float | None
    recompute_seconds: float | None
    way: str

    def sentence(self) -> str:
        """Say the comparison."""
        if self.transfer_seconds is None or self.recompute_seconds is None:
            return f"{self.way}: not both ways were measured yet"
        sign = "<" if self.transfer_seconds < self.recompute_seconds else ">="
        return f"transfer {self.transfer_seconds:.3f} s {sign} recompute {self.recompute_seconds:.3f} s"


@dataclass(frozen=True, slots=True)
class Relocation:
    """One conversation to move."""

    session_id: str
    source_id: str
    target_id: str
    owner_epoch: int
    context_tokens: int
    estimate: Estimate
    why: str


@dataclass(frozen=True, slots=True)
class Stay:
    """A conversation that should move and does not, and why."""

    session_id: str
    replica_id: str
    why: str


@dataclass(frozen=True, slots=True)
class RelocationPlan:
    """Moves to begin now, those that wait with their reasons, and which deployments are being levelled."""

    moves: tuple[Relocation, ...] = ()
    stays: tuple[Stay, ...] = ()
    balancing: frozenset[str] = frozenset()
    """To be handed to the next plan: it stops later than it starts."""
    pressures: tuple[tuple[str, float], ...] = ()
    """Replica id and pressure before the moves, fullest first; those of unknown capacity are left out."""
    notes: tuple[str, ...] = ()
    """One sentence for each deployment whose balance was looked at."""


@dataclass(frozen=True, slots=True)
class FleetSessions:
    """All that a plan is made from."""

    holders: tuple[Holder, ...]
    sessions: tuple[HeldSession, ...]
    rates: tuple[tuple[str, Rates], ...]
    """By deployment."""
    underway: tuple[Underway, ...] = ()
    balancing: frozenset[str] = frozenset()


def estimate_move(tokens: int, rates: Rates, *, same_node: bool, same_layout: bool) -> Estimate:
    """Compare sending the KV of so many tokens with computing it again at the target."""
    kv_bytes = tokens * rates.kv_bytes_per_token
    speed = rates.same_node_bytes_per_second if same_node else rates.across_bytes_per_second
    transfer = rates.fixed_seconds + kv_bytes / speed if speed else None
    recompute = tokens / rates.prefill_tokens_per_second if rates.prefill_tokens_per_second else None
    way = TRANSFER
    if not same_layout or (transfer is not None and recompute is not None and transfer >= recompute):
        way = RECOMPUTE
    return Estimate(kv_bytes if way == TRANSFER else 0, transfer, recompute, way)


def plan_relocations(fleet: FleetSessions, budget: Budget, thresholds: Thresholds) -> RelocationPlan:
    """Choose the moves to begin now.

    Asked moves come first, then those off replicas that leave (most recently used conversations
    first: they are back soonest), then balance. Deterministic; ties go by name.
    """
    return _Planner(fleet, budget, thresholds).plan()


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

    def __init__(self, fleet: FleetSessions, budget: Budget, thresholds: Thresholds) -> None:
        self._fleet = fleet
        self._thresholds = thresholds
        self._holders = {holder.replica_id: holder for holder in fleet.holders}
        self._able: defaultdict[str, list[Holder]] = defaultdict(list)
        """Holders that may be given conversations, by deployment."""
        for holder in fleet.holders:
            if holder.accepts and not holder.leaves:
                self._able[holder.deployment].append(holder)
        self._rates = dict(fleet.rates)
        self._allowance = _Allowance(budget, budget.bytes_available, 0)
        self._moving = {move.session_id for move in fleet.underway}
        self._tokens: Counter[str] = Counter()
        self._sessions: defaultdict[str, list[HeldSession]] = defaultdict(list)
        self._moves: list[Relocation] = []
        self._stays: list[Stay] = []
        for move in fleet.underway:
            self._allowance.take(self._nodes(move.source_id, move.target_id), 0)
        going = {move.session_id: move.target_id for move in fleet.underway}
        for session in fleet.sessions:
            self._sessions[session.replica_id].append(session)
            if session.idle_seconds <= thresholds.active_seconds:
                # What is on its way counts where it goes, or the same gap would be closed twice.
                self._tokens[going.get(session.session_id, session.replica_id)] += session.context_tokens

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
                self._try(session, target, "an operator asked for it")

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
            target = self._best_target(source, session, ceiling=None)
            if target is None:
                others = "none of the replicas it may go to" if source.leave_to else _NO_OTHER
                self._stay(session, f"{others} takes conversations now")
            else:
                self._try(session, target, source.leaves)

    # -- balance -------------------------------------------------------------------------------------
    def _balance(self) -> tuple[frozenset[str], tuple[str, ...]]:
        groups: defaultdict[str, list[Holder]] = defaultdict(list)
        for holder in self._fleet.holders:
            if not holder.leaves and self._pressure(holder) is not None:
                groups[holder.deployment].append(holder)
        levelled: set[str] = set()
        notes: list[str] = []
        for deployment, holders in sorted(groups.items()):
            was_on = deployment in self._fleet.balancing
            note = self._level(holders, was_on=was_on)
            if note:
                levelled.add(deployment)
                notes.append(f"{deployment}: {note}")
        return frozenset(levelled), tuple(notes)

    def _level(self, holders: Sequence[Holder], *, was_on: bool) -> str:
        """Move conversations off the fullest until the gap is small. Returns why, if it was not before."""
        fullest, gap = self._gap(holders)
        limits = self._thresholds
        starts = self._pressure_of(fullest) >= limits.start_pressure and gap >= limits.start_gap_ratio
        if not (starts or (was_on and gap > limits.stop_gap_ratio)):
            return ""
        note = f"fullest {self._pressure_of(fullest):.2f}, gap {gap:.2f}"
        exhausted: set[str] = set()
        while gap > limits.stop_gap_ratio and fullest.replica_id not in exhausted:
            if not self._relieve(fullest, gap):
                exhausted.add(fullest.replica_id)
            fullest, gap = self._gap(holders)
        return note

    def _relieve(self, source: Holder, gap: float) -> bool:
        """Begin the largest move off `source` that does not overshoot."""
        for session in sorted(self._movable(source), key=lambda s: (-s.context_tokens, s.session_id)):
            target = self._best_target(source, session, ceiling=self._pressure_of(source))
            if target is None:
                continue
            change = session.context_tokens / (source.kv_capacity_tokens or 1)
            change += session.context_tokens / (target.kv_capacity_tokens or 1)
            if change > gap or self._estimate(session, source, target).way != TRANSFER:
                continue  # it would only turn the imbalance round, or cost more than it gains
            here, there = self._pressure_of(source), self._pressure_of(target)
            why = f"replica at {here:.2f} of its KV, target at {there:.2f}"
            return self._try(session, target, why, quietly=True)
        return False

    def _movable(self, source: Holder) -> Iterable[HeldSession]:
        limits = self._thresholds
        for session in self._sessions[source.replica_id]:
            rested = session.moved_seconds_ago is None or session.moved_seconds_ago >= limits.rest_seconds
            settled = limits.settle_seconds <= session.idle_seconds <= limits.active_seconds
            idle = not session.in_turn and session.session_id not in self._moving
            if idle and rested and settled and session.context_tokens > 0 and not session.asked_target:
                yield session

    def _gap(self, holders: Sequence[Holder]) -> tuple[Holder, float]:
        fullest = max(holders, key=lambda h: (self._pressure_of(h), h.replica_id))
        able = [self._pressure_of(h) for h in holders if h.accepts and h is not fullest]
        return fullest, self._pressure_of(fullest) - min(able, default=self._pressure_of(fullest))

    # -- one move ------------------------------------------------------------------------------------
    def _best_target(self, source: Holder, session: HeldSession, *, ceiling: float | None) -> Holder | None:
        """The emptiest replica, with something in favour of near ones; below `ceiling` if given."""
        able = [
            (self._pressure_with(holder, session) + _distance(source, holder), holder.replica_id, holder)
            for holder in self._able[source.deployment]
            if holder.replica_id != source.replica_id
            and (not source.leave_to or holder.replica_id in source.leave_to)
        ]
        if ceiling is not None:
            able = [entry for entry in able if self._pressure_with(entry[2], session) < ceiling]
        return min(able, key=lambda entry: entry[:2])[2] if able else None

    def _try(self, session: HeldSession, target: Holder, why: str, *, quietly: bool = False) -> bool:
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
        if session.idle_seconds <= self._thresholds.active_seconds:
            self._tokens[session.replica_id] -= session.context_tokens
            self._tokens[target.replica_id] += session.context_tokens
        self._moves.append(
            Relocation(
                session.session_id,
                session.replica_id,
                target.replica_id,
                session.owner_epoch,
                session.context_tokens,
                estimate,
                why,
            )
        )
        return True

    def _estimate(self, session: HeldSession, source: Holder | None, target: Holder) -> Estimate:
        rates = self._rates.get(target.deployment, Rates(0))
        return estimate_move(
            session.context_tokens,
            rates,
            same_node=source is not None and source.node_id == target.node_id,
            same_layout=source is not None
            and not (source.leaves and source.leaves_kv)
            and source.kv_layout == target.kv_layout != "",
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
        """Pressure once it holds the conversation too; of unknown capacity: in the middle."""
        if not holder.kv_capacity_tokens:
            return 0.5
        return (self._tokens[holder.replica_id] + session.context_tokens) / holder.kv_capacity_tokens


def _distance(source: Holder, target: Holder) -> float:
    if source.node_id == target.node_id:
        return 0.0
    return _SAME_RACK_PENALTY if source.rack and source.rack == target.rack else _FAR_PENALTY
