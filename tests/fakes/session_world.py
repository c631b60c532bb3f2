"""A fleet of replicas with conversations on a virtual clock, whose sessions a planner balances."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from exaserve_ops.sessions.domain.pace import BytePace, MoveLimits
from exaserve_ops.sessions.domain.relocation import (
    ACTIVE_SECONDS,
    BALANCE,
    FleetSessions,
    HeldSession,
    Holder,
    Levelled,
    Rates,
    Relocation,
    Thresholds,
    Underway,
)
from exaserve_ops.sessions.domain.relocation_plan import plan_relocations
from exaserve_ops.sessions.domain.sending import Sending

RATES = Rates(
    kv_bytes_per_token=1000,
    prefill_tokens_per_second=2_000.0,
    same_node=Sending(1e9),
    across=Sending(1e8),
)
PLAN_SECONDS = 5.0


@dataclass
class Place:
    """A replica."""

    name: str
    node: str
    capacity_tokens: int
    leaves: str = ""


@dataclass
class Talk:
    """A conversation: it thinks, has a turn, and thinks again."""

    name: str
    home: str
    tokens: int
    think_seconds: float
    turn_until: float | None = None
    next_turn: float = 0.0
    ended_at: float = 0.0
    turns: int = 2
    moved_at: float | None = None


@dataclass
class Move:
    """One that is under way."""

    talk: Talk
    plan: Relocation
    began: float
    until: float
    turns: int


@dataclass
class SessionWorld:
    """Steps of a second. What the planner is told is what a control plane knows, unless it `sees_turns`."""

    seed: int
    limits: MoveLimits
    thresholds: Thresholds = field(default_factory=Thresholds)
    grows: bool = False
    sees_turns: bool = False
    now: float = 0.0
    places: dict[str, Place] = field(default_factory=dict)
    talks: dict[str, Talk] = field(default_factory=dict)
    moves: dict[str, Move] = field(default_factory=dict)
    balancing: frozenset[str] = frozenset()
    done: list[tuple[float, Relocation]] = field(default_factory=list)
    """When each balance move began."""
    swapped: list[tuple[float, Relocation]] = field(default_factory=list)
    most_underway: int = 0
    most_on_a_node: int = 0
    sent: list[tuple[float, int]] = field(default_factory=list)
    levelled_once: bool = False
    begun_in_turn: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311 - a world that can be made again
        self._pace = BytePace(self.limits, self.now)

    def populate(self, *, replicas: int, talks: int, skew: float, largest: int = 900) -> None:
        """Fill the fleet; `skew` of the conversations begin at the first replica."""
        for number in range(replicas):
            name = f"r{number}"
            self.places[name] = Place(name, f"n{number // 2}", self.random.choice([10_000, 14_000]))
        for number in range(talks):
            home = "r0" if self.random.random() < skew else f"r{self.random.randrange(replicas)}"
            self.arrive(f"s{number}", home, self.random.randint(100, largest))

    def arrive(self, name: str, home: str, tokens: int) -> None:
        """Another conversation."""
        think = self.random.uniform(4, 60)
        self.talks[name] = Talk(name, home, tokens, think, next_turn=self.now + self.random.random() * think)

    def change_leader(self) -> None:
        """Another one knows the record only: what is being levelled, and what moves."""
        self._pace = BytePace(self.limits, self.now)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self._converse()
            self._end_moves()
            if self.now % PLAN_SECONDS == 0:
                self._plan()

    def pressure(self, place: Place) -> float:
        """By all that is known, moves under way not counted."""
        held = sum(t.tokens for t in self.talks.values() if t.home == place.name and self._is_active(t))
        return held / place.capacity_tokens

    def gap(self) -> float:
        """As thresholds mean it."""
        pressures = [self.pressure(place) for place in self.places.values() if not place.leaves]
        return (max(pressures) - min(pressures)) / max(1.0, *pressures)

    def _is_active(self, talk: Talk) -> bool:
        return self.now - talk.ended_at <= ACTIVE_SECONDS

    def _converse(self) -> None:
        for talk in self.talks.values():
            if talk.turn_until is not None and self.now >= talk.turn_until:
                talk.turn_until, talk.ended_at = None, self.now
                talk.next_turn = self.now + self.random.expovariate(1 / talk.think_seconds)
                talk.tokens += self.random.randint(0, 120) if self.grows and talk.tokens < 3_000 else 0
            elif talk.turn_until is None and self.now >= talk.next_turn:
                talk.turn_until = self.now + self.random.uniform(1, 4)
                talk.turns += 1

    def _end_moves(self) -> None:
        for name, move in list(self.moves.items()):
            if self.now < move.until:
                continue
            del self.moves[name]
            move.talk.moved_at = self.now
            if move.talk.turns == move.turns and move.talk.turn_until is None:
                move.talk.home = move.plan.target_id
                self.swapped.append((self.now, move.plan))

    def _plan(self) -> None:
        fleet = self._known()
        plan = plan_relocations(fleet, self._pace.budget(self.now))
        self.balancing = plan.balancing
        self.levelled_once |= bool(plan.balancing)
        for relocation in plan.moves:
            talk = self.talks[relocation.session_id]
            self._pace.take(relocation.estimate.kv_bytes)
            self.sent.append((self.now, relocation.estimate.kv_bytes))
            if relocation.trigger == BALANCE:
                self.done.append((self.now, relocation))
            if talk.turn_until is not None:
                self.begun_in_turn.append(talk.name)
            took = self.random.uniform(0.5, 8.0)
            self.moves[talk.name] = Move(talk, relocation, self.now, self.now + took, talk.turns)
        self.most_underway = max(self.most_underway, len(self.moves))
        nodes = Counter(
            node
            for move in self.moves.values()
            for node in {self.places[move.plan.source_id].node, self.places[move.plan.target_id].node}
        )
        self.most_on_a_node = max([self.most_on_a_node, *nodes.values()])

    def _known(self) -> FleetSessions:
        tokens: Counter[str] = Counter()
        for talk in self.talks.values():
            tokens[talk.home] += talk.tokens if self._is_active(talk) else 0
        holders = [
            Holder(
                p.name, p.node, "", "chat", "layout", p.capacity_tokens, tokens[p.name],
                accepts=not p.leaves, leaves=p.leaves,
            )
            for p in self.places.values()
        ]  # fmt: skip
        recent = [
            (when, plan) for when, plan in self.swapped if plan.trigger == BALANCE and self.now - when < 1_000
        ]
        levelled = [Levelled(p.source_id, p.target_id, self.now - when) for when, p in recent]
        levelled += [Levelled(m.plan.source_id, m.plan.target_id, 0.0) for m in self.moves.values()]
        return FleetSessions(
            holders=tuple(holders),
            sessions=tuple(self._told(talk) for talk in self.talks.values() if self._is_active(talk)),
            rates=(("chat", RATES),),
            underway=tuple(
                Underway(m.talk.name, m.plan.source_id, m.plan.target_id, m.talk.tokens)
                for m in self.moves.values()
            ),
            thresholds=(("chat", self.thresholds),),
            balancing=self.balancing,
            levelled=tuple(levelled),
        )

    def _told(self, talk: Talk) -> HeldSession:
        return HeldSession(
            session_id=talk.name,
            replica_id=talk.home,
            owner_epoch=0,
            context_tokens=talk.tokens,
            idle_seconds=self.now - talk.ended_at,
            in_turn=self.sees_turns and talk.turn_until is not None,
            turns=talk.turns,
            moved_seconds_ago=None if talk.moved_at is None else self.now - talk.moved_at,
        )
