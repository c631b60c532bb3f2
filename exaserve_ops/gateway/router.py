"""From a model (and a session) to a replica, with the reason; or why there is none just now."""

from __future__ import annotations

import enum
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from exaserve_ops.adapters.session_table import NOBODY, OnEntry, SessionEntry, SessionTable
from exaserve_ops.gateway import refusals
from exaserve_ops.gateway.fleet import REPINNED, STICKY, Fleet, NodeGroup, ReplicaSlot
from exaserve_ops.gateway.owners import RecentOwners
from exaserve_ops.gateway.requests import Prompt
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
CONTINUED = "continued"
"""The reason of a stream's last replica, where another one had begun it."""
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
    LONG = refusals.LONG_PROMPTS_QUEUE
    """All who have room compute long prompts already, of which this is one more."""
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
    is_long: bool = False
    """Takes the place of a long prompt, whatever its size."""
    prompt: Prompt = b""
    """Its part of the body, as it came."""
    long_places_taken: bool = False
    """Whether as many replicas compute long prompts already as may."""
    cached_tokens: float = 0.0
    """What the replica that was picked is thought to have of it."""
    beginning: Beginning | None = None
    """Worked out only where nobody owns the request."""

    @property
    def uncached_tokens(self) -> float:
        """About what there is to compute before the first token."""
        return self.uncached_beside(self.cached_tokens)

    def uncached_beside(self, cached_tokens: float) -> float:
        """About what there is to compute where so much of the prompt is known."""
        return max(0.0, len(self.prompt) / BYTES_PER_TOKEN - cached_tokens)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one gateway has open at one replica at most."""

    in_flight: int = 256
    batch_in_flight: int = 4
    long_prompts: int = 1
    long_prompt_tokens: int = 16_384
    long_prompt_share: float = 0.75
    """Of a model's replicas that compute long prompts at once: the others answer short ones meanwhile."""


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
        bounds: Bounds,
        is_overtaking: Callable[[str], bool],
        tell: Callable[[bytes, Sequence[bytes]], None],
        clock: Callable[[], float],
    ) -> None:
        """Route to `fleet`. `is_overtaking`: whether a batch request of a model would pass one that waits.

        `tell` is given what prompts' beginnings a replica was sent, for the other gateways.
        """
        self._fleet = fleet
        self._sessions = sessions
        self._bounds = bounds
        self._is_overtaking = is_overtaking
        self._tell = tell
        self._clock = clock
        self._draw = random.randrange
        self._prefixes = PrefixMemory()
        self._owners = RecentOwners()
        self._long_prompts: Counter[str] = Counter()
        """Those of each model that are not computed yet, on all replicas."""
        self._sessions_away_until_seconds = 0.0
        self.session_failures = 0

    def pick(self, ask: Ask) -> Route | Obstacle:
        """Choose without asking the session table: by its entry if known, by load, or by hash without it."""
        if ask.is_batch and self._is_overtaking(ask.model):
            return Obstacle.FULL
        ask.long_places_taken = self._may_be_long(ask) and self._are_long_places_taken(ask.model)
        if ask.entry is not None and (owned := self._pick_owner(ask, ask.entry)):
            return owned
        groups = self._fleet.groups(ask.model)
        now = self._clock()

        def is_possible(slot: ReplicaSlot) -> bool:
            return slot not in ask.tried and self._takes(slot, ask)

        def is_usable(slot: ReplicaSlot) -> bool:
            return slot.reach is not False and markdown.is_open(slot.mark, now) and is_possible(slot)

        if ask.session_id and not self._has_table(ask):
            # All gateways decide alike without a table. With one, the first turn goes by load, and
            # the table makes the others follow it.
            key = f"{ask.model}\0{ask.session_id}"
            choice = policy.choose_by_hash(key, groups, is_usable, avoid_node=ask.avoid_node)
        else:
            choice = policy.choose(groups, self._draw, is_usable, avoid_node=ask.avoid_node)
            if len(ask.prompt) >= FIRST_PIECE_BYTES:
                choice = self._pick_by_prefix(ask, choice)
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
            news = self._prefixes.note(ask.beginning.digests, slot.name, self._clock())
            if news:
                self._tell(slot.owner, news)

    @property
    def known_beginnings(self) -> int:
        """Beginnings of prompts whose replicas are remembered."""
        return len(self._prefixes)

    def hear(self, owner: bytes, digests: Sequence[bytes], at_seconds: float) -> None:
        """Take in what another gateway sent to a replica."""
        slot = self._fleet.find_owner(owner)
        if slot is not None:
            self._prefixes.note(digests, slot.name, at_seconds)

    def take_long_place(self, ask: Ask, slot: ReplicaSlot, uncached_tokens: float) -> bool:
        """Count a request as a long prompt of the replica it goes to, if it is one there."""
        if not ask.is_long and uncached_tokens < self._bounds.long_prompt_tokens:
            return False
        slot.long_prompts += 1
        self._long_prompts[ask.model] += 1
        return True

    def leave_long_place(self, ask: Ask, slot: ReplicaSlot) -> None:
        """Its prompt is computed, or will not be."""
        slot.long_prompts -= 1
        self._long_prompts[ask.model] -= 1
        if not self._long_prompts[ask.model]:
            del self._long_prompts[ask.model]

    def _pick_by_prefix(self, ask: Ask, drawn: Route | None) -> Route | None:
        """Prefer a replica that has the prompt's beginning, if it is not too busy for that to pay."""
        beginning = ask.beginning = ask.beginning or describe_text(bytes(ask.prompt))
        now = self._clock()

        def find(name: str, cached_tokens: float) -> ReplicaSlot | None:
            slot = self._fleet.find(name)
            if slot is None or slot.record.model != ask.model or slot.record.is_left:
                return None
            is_well = slot.reach is not False and markdown.is_open(slot.mark, now)
            may_be = is_well and slot not in ask.tried and slot.record.node_id != ask.avoid_node
            return slot if may_be and self._takes(slot, ask, cached_tokens) else None

        def evicted_until(name: str) -> float:
            slot = self._fleet.find(name)
            return math.inf if slot is None else slot.evicted_until_seconds

        others = (drawn.replica,) if drawn else ()
        best = choose_by_prefix(beginning, self._prefixes, find, others, evicted_until=evicted_until)
        ask.cached_tokens = best.cached_tokens if best else 0.0
        return policy.Choice(best.server, PREFIX) if best and best.cached_tokens else drawn

    def has_other(self, ask: Ask, slot: ReplicaSlot) -> bool:
        """Whether somebody else could take the request of this replica now."""
        return not isinstance(self.pick(replace(ask, tried=(*ask.tried, slot))), Obstacle)

    def recall(self, ask: Ask, then: OnEntry) -> Route | None:
        """Return the owner that a session had a moment ago, if it serves, and have the table count the turn.

        The turn may leave at once. What the table says comes to `then`: the truth, if it moved meanwhile.
        """
        if not ask.session_id or ask.entry is not None or ask.is_batch or self._may_be_long(ask):
            return None
        now = self._clock()
        entry = self._owners.find(ask.model, ask.session_id, now) if self._is_table_there(now) else None
        if entry is None:
            return None
        owner = self._fleet.find_owner(entry.owner)
        if (
            owner is None
            or not self._still_serves(owner, ask, now)
            or owner.in_flight >= self._bounds.in_flight
        ):
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
        return bool(ask.session_id) and self._is_table_there(self._clock())

    def _is_table_there(self, now: float) -> bool:
        return now >= self._sessions_away_until_seconds

    def _pick_owner(self, ask: Ask, entry: SessionEntry) -> Route | Obstacle | None:
        """Return the session's own replica while it serves, though it may be full."""
        owner = self._fleet.find_owner(entry.owner)
        if owner is None or not self._still_serves(owner, ask, self._clock()):
            return None
        if owner.in_flight >= self._limit_of(ask):
            return Obstacle.FULL
        ask.cached_tokens = float(entry.context_tokens)
        if self._is_one_too_long(owner, ask, ask.cached_tokens):
            return Obstacle.LONG
        if ask.was_repinned:
            return owner.routes[REPINNED]
        return owner.routes[policy.DRAWN if entry.turns == 1 else STICKY]

    def _still_serves(self, owner: ReplicaSlot, ask: Ask, now: float) -> bool:
        return (
            owner.record.serves_sessions
            and owner.is_open
            and owner.record.model == ask.model
            and owner not in ask.tried
            and markdown.is_open(owner.mark, now)
        )

    def _has_room(self, slot: ReplicaSlot, ask: Ask) -> bool:
        return slot.record.accepts_new and slot.is_open and slot.in_flight < self._limit_of(ask)

    def _limit_of(self, ask: Ask) -> int:
        bounds = self._bounds
        return min(bounds.batch_in_flight, bounds.in_flight) if ask.is_batch else bounds.in_flight

    def _takes(self, slot: ReplicaSlot, ask: Ask, cached_tokens: float = 0.0) -> bool:
        """Whether a replica that has so much of the prompt can take it now."""
        return self._has_room(slot, ask) and not self._is_one_too_long(slot, ask, cached_tokens)

    def _is_one_too_long(self, slot: ReplicaSlot, ask: Ask, cached_tokens: float) -> bool:
        """Whether it is a long prompt there, and as many such as may be are not computed yet."""
        bounds = self._bounds
        if slot.long_prompts < bounds.long_prompts and not ask.long_places_taken:
            return False
        return ask.is_long or ask.uncached_beside(cached_tokens) >= bounds.long_prompt_tokens

    def _may_be_long(self, ask: Ask) -> bool:
        return ask.is_long or len(ask.prompt) >= self._bounds.long_prompt_tokens * BYTES_PER_TOKEN

    def _are_long_places_taken(self, model: str) -> bool:
        computing = self._long_prompts[model]
        replicas = sum(len(group.replicas) for group in self._fleet.groups(model)) if computing else 0
        return computing > 0 and computing >= self._bounds.long_prompt_share * replicas

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
        untried = [slot for slot in accepting if slot not in ask.tried]
        if untried:
            return Obstacle.LONG if any(self._has_room(slot, ask) for slot in untried) else Obstacle.FULL
        return Obstacle.UNREACHABLE
