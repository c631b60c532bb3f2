"""From a model (and a session) to a replica, with the reason; or why there is none just now."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from exaserve_ops.adapters.session_table import NOBODY, OnEntry, SessionEntry, SessionTable
from exaserve_ops.gateway import refusals
from exaserve_ops.gateway.fleet import REPINNED, STICKY, Fleet, NodeGroup, ReplicaSlot
from exaserve_ops.gateway.owners import RecentOwners
from exaserve_ops.routing.domain import markdown, policy
from exaserve_ops.routing.domain.prefixes import (
    BYTES_PER_TOKEN,
    FIRST_PIECE_BYTES,
    Beginning,
    PrefixMemory,
    choose_by_prefix,
    describe_text,
)

RETRIED = "retry"
PREFIX = "prefix"

_AWAY_SECONDS = 1.0
"""After the session table failed it is not asked for so long, so that turns do not queue for it."""
_PROPOSALS = 4
"""One turn proposes an owner so often at most; then it goes where it may."""

Route = policy.Choice[ReplicaSlot]


class Obstacle(enum.Enum):
    """Why a request has to wait; its value is what it is told if it has waited for too long."""

    NOTHING_SERVES = refusals.NOTHING_SERVES
    FULL = refusals.OVERLOADED
    UNREACHABLE = refusals.UNREACHABLE


@dataclass(slots=True)
class Ask:
    """What is wanted, and what has been learnt about it so far."""

    model: str
    session_id: str
    tried: Collection[ReplicaSlot] = ()
    """Replicas that failed this request."""
    avoid_node: str = ""
    entry: SessionEntry | None = None
    """The session's entry; a turn claims it once, however often it is routed."""
    was_repinned: bool = False
    proposals: int = 0
    """How often an owner was proposed to the table."""
    is_batch: bool = False
    """Goes only where little is open, and overtakes nobody who waits."""
    prompt: bytes = b""
    """Its part of the body, as it came."""
    cached_tokens: float = 0.0
    """What the replica that was picked is thought to have of it."""
    beginning: Beginning | None = None
    """Worked out only where nobody owns the request."""

    @property
    def uncached_tokens(self) -> float:
        """About what there is to compute before the first token."""
        return max(0.0, len(self.prompt) / BYTES_PER_TOKEN - self.cached_tokens)


class Router:
    """Chooses replicas. Holds no requests and opens no connection.

    A session's request is looked up first, then picked for, and what was picked is proposed where the
    table has another owner or none. A turn of a session that has an owner costs one round trip, and
    does not wait for it if the owner was asked for of late.
    """

    def __init__(
        self,
        fleet: Fleet,
        sessions: SessionTable,
        *,
        in_flight_limit: int,
        batch_limit: int,
        is_overtaking: Callable[[str], bool],
        clock: Callable[[], float],
    ) -> None:
        """Route to `fleet`. `is_overtaking`: whether a batch request of a model would pass one that waits."""
        self._fleet = fleet
        self._sessions = sessions
        self._in_flight_limit = in_flight_limit
        self._batch_limit = min(batch_limit, in_flight_limit)
        self._is_overtaking = is_overtaking
        self._clock = clock
        self._draw = random.randrange
        self._prefixes = PrefixMemory()
        self._owners = RecentOwners()
        self._sessions_away_until_seconds = 0.0
        self.session_failures = 0

    def pick(self, ask: Ask) -> Route | Obstacle:
        """Choose without asking the session table: by its entry if known, by load, or by hash without it."""
        if ask.is_batch and self._is_overtaking(ask.model):
            return Obstacle.FULL
        if ask.entry is not None and (owned := self._pick_owner(ask, ask.entry)):
            return owned
        groups = self._fleet.groups(ask.model)
        now = self._clock()

        def is_possible(slot: ReplicaSlot) -> bool:
            return self._has_room(slot, ask) and slot not in ask.tried

        def is_usable(slot: ReplicaSlot) -> bool:
            return slot.reach is not False and markdown.is_open(slot.mark, now) and is_possible(slot)

        if ask.session_id and not self._has_table(ask):
            # All gateways decide alike without a table. With one, the first turn goes by load, and
            # the table makes the others follow it.
            key = f"{ask.model}\0{ask.session_id}"
            choice = policy.choose_by_hash(key, groups, is_usable, avoid_node=ask.avoid_node)
        else:
            choice = policy.choose(groups, self._draw, is_usable, avoid_node=ask.avoid_node)
            if choice is not None and len(ask.prompt) >= FIRST_PIECE_BYTES:
                choice = self._pick_by_prefix(ask, choice, is_usable)
        choice = choice or self._pick_despite(ask, groups, is_usable, is_possible)
        if choice is None:
            return self._obstacle(ask)
        return policy.Choice(choice.replica, RETRIED) if ask.tried else choice

    def _pick_despite(
        self,
        ask: Ask,
        groups: list[NodeGroup],
        is_usable: Callable[[ReplicaSlot], bool],
        is_possible: Callable[[ReplicaSlot], bool],
    ) -> Route | None:
        """Where no well replica that stays has room: one that sessions are leaving, or one that failed."""
        left = self._fleet.left_groups(ask.model)
        return (
            policy.choose(left, self._draw, is_usable, avoid_node=ask.avoid_node)
            or policy.choose_last_resort(groups, is_possible)
            or policy.choose_last_resort(left, is_possible)
        )

    def note_sent(self, ask: Ask, slot: ReplicaSlot) -> None:
        """Remember that a replica is about to have this prompt."""
        if ask.beginning is not None:
            self._prefixes.note(ask.beginning, slot.name)

    def _pick_by_prefix(self, ask: Ask, drawn: Route, is_usable: Callable[[ReplicaSlot], bool]) -> Route:
        """Prefer a replica that has the prompt's beginning, if it is not too busy for that to pay."""
        beginning = ask.beginning = ask.beginning or describe_text(ask.prompt)

        def find(name: str) -> ReplicaSlot | None:
            slot = self._fleet.find(name)
            if slot is None or slot.record.model != ask.model or slot.record.is_left:
                return None
            return slot if is_usable(slot) and slot.record.node_id != ask.avoid_node else None

        best = choose_by_prefix(beginning, self._prefixes, find, (drawn.replica,))
        ask.cached_tokens = best.cached_tokens if best else 0.0
        return policy.Choice(best.server, PREFIX) if best and best.cached_tokens else drawn

    def has_other(self, ask: Ask, slot: ReplicaSlot) -> bool:
        """Whether somebody else could take the request of this replica now."""
        return not isinstance(self.pick(replace(ask, tried=(*ask.tried, slot))), Obstacle)

    def recall(self, ask: Ask, then: OnEntry) -> Route | None:
        """Return the owner that a session had a moment ago, if it serves, and have the table count the turn.

        The turn may leave at once. What the table says comes to `then`: the truth, if it moved meanwhile.
        """
        if ask.entry is not None or ask.is_batch or not self._has_table(ask):
            return None
        entry = self._owners.find(ask.model, ask.session_id, self._clock())
        if entry is None:
            return None
        owner = self._fleet.find_owner(entry.owner)
        if owner is None or not self._still_serves(owner, ask) or owner.in_flight >= self._in_flight_limit:
            return None
        ask.entry = entry
        ask.cached_tokens = float(entry.context_tokens)
        self._sessions.count(ask.model, ask.session_id, entry.owner, then)
        return owner.routes[STICKY]

    def look(self, ask: Ask, then: OnEntry) -> bool:
        """Ask the table for a session's entry, and count the turn. Returns false if nothing is to be asked.

        Nothing is proposed yet: a hash ranks every node, which only a session without an entry needs.
        """
        if ask.entry is not None or not self._has_table(ask):
            return False
        self._sessions.claim(ask.model, ask.session_id, NOBODY, then)
        return True

    def propose(self, ask: Ask, route: Route, then: OnEntry) -> bool:
        """Have the table say so, where it says otherwise. Returns false if the request may just go."""
        entry = ask.entry
        if (entry is not None and entry.owner == route.replica.owner) or not self._has_table(ask):
            return False
        if ask.proposals >= _PROPOSALS:
            return False
        ask.proposals += 1
        if entry is None:
            self._sessions.claim(ask.model, ask.session_id, route.replica.owner, then)
        else:
            ask.was_repinned = True
            self._sessions.repin(ask.model, ask.session_id, route.replica.owner, entry.owner_epoch, then)
        return True

    def note_entry(self, ask: Ask, entry: SessionEntry | None) -> None:
        """Take in what the table said; `None` if it is away."""
        if entry is None:
            self.session_failures += 1
            self._sessions_away_until_seconds = self._clock() + _AWAY_SECONDS
        elif entry.owner_epoch:
            ask.entry = entry
            self._owners.note(ask.model, ask.session_id, entry, self._clock())

    def _has_table(self, ask: Ask) -> bool:
        return bool(ask.session_id) and self._clock() >= self._sessions_away_until_seconds

    def _pick_owner(self, ask: Ask, entry: SessionEntry) -> Route | Obstacle | None:
        """Return the session's own replica while it serves, though it may be full."""
        owner = self._fleet.find_owner(entry.owner)
        if owner is None or not self._still_serves(owner, ask):
            return None
        if owner.in_flight >= self._limit_of(ask):
            return Obstacle.FULL
        ask.cached_tokens = float(entry.context_tokens)
        if ask.was_repinned:
            return owner.routes[REPINNED]
        return owner.routes[policy.DRAWN if entry.turns == 1 else STICKY]

    def _still_serves(self, owner: ReplicaSlot, ask: Ask) -> bool:
        return (
            owner.record.serves_sessions
            and owner.is_open
            and owner.record.model == ask.model
            and owner not in ask.tried
            and markdown.is_open(owner.mark, self._clock())
        )

    def _has_room(self, slot: ReplicaSlot, ask: Ask) -> bool:
        return slot.record.accepts_new and slot.is_open and slot.in_flight < self._limit_of(ask)

    def _limit_of(self, ask: Ask) -> int:
        return self._batch_limit if ask.is_batch else self._in_flight_limit

    def _obstacle(self, ask: Ask) -> Obstacle:
        accepting = [
            slot
            for group in (*self._fleet.groups(ask.model), *self._fleet.left_groups(ask.model))
            for slot in group.replicas
            if slot.record.accepts_new
        ]
        if not accepting:
            return Obstacle.NOTHING_SERVES
        if not any(slot.is_open for slot in accepting):
            return Obstacle.UNREACHABLE
        if any(slot not in ask.tried for slot in accepting):
            return Obstacle.FULL
        return Obstacle.UNREACHABLE
