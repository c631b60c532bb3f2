"""Moves conversations between their turns: chooses, has them sent, and then has the next turn go there.

Until the swap in the session table a conversation is whole at its source, and served there; nothing
before that has to be undone. So a move that a turn, a death or a new leader came between is dropped,
and where it still makes sense it is planned again. What a leader that died had begun is in the record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from exaserve_ops.controllers.fleet_state import FleetState
from exaserve_ops.controllers.ports import AgentLink, SessionPins
from exaserve_ops.inventory.domain.liveness import DEAD
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.sessions.domain.moves import PLANNED, SENDING, SWITCHING, MoveOrder, Pin, move_command
from exaserve_ops.sessions.domain.pace import BytePace, MoveLimits
from exaserve_ops.sessions.domain.relocation import (
    PREFILL,
    RECOMPUTE,
    RelocationPlan,
    ReplicaRoom,
    room_of,
)
from exaserve_ops.sessions.domain.relocation import Relocation as PlannedMove
from exaserve_ops.sessions.domain.relocation_plan import plan_relocations
from exaserve_ops.sessions.models import InferenceSession, Relocation
from exaserve_ops.sessions.selectors.moves import live_relocations, movable_fleet, takes_sessions
from exaserve_ops.sessions.services.balance import record_balance
from exaserve_ops.sessions.services.relocations import advance_relocation, note_wait, plan_move

ACTOR = "controller:moves"
_CLOCKS_SECONDS = 2.0
"""Clocks of Redis and of gateways may differ by so much, and whole seconds are kept of one."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MovePolicy:
    """How much moves at once, how fast, and how long each part may take."""

    limits: MoveLimits = field(default_factory=MoveLimits)
    balance_every_seconds: float = 5.0
    """Levelling is no hurry, and looks at all sessions."""
    send_seconds: float = 30.0
    answer_seconds: float = 10.0
    """Beyond that, for the agent's answer to get here."""
    planned_seconds: float = 60.0
    switch_seconds: float = 30.0
    rounds: int = 8
    """Plans in one step, while there is more to begin: what moves without its KV is over at once."""


class SessionMoves:
    """One look at all moves a step; the record has everything, so another leader goes on with it."""

    def __init__(
        self, state: FleetState, link: AgentLink, pins: SessionPins, policy: MovePolicy | None = None
    ) -> None:
        self._state = state
        self._link = link
        self._pins = pins
        self._policy = policy or MovePolicy()
        self._pace = BytePace(self._policy.limits, time.monotonic())
        self._levelled_seconds = -1e9

    def step(self) -> None:
        """Bring every move on by what is due."""
        now = clock.now()
        for row in live_relocations():
            if now - row.status_changed_at > self._limit(row):
                self._advance(row, "drop", f"it was {row.status} for too long")
            elif row.source is None or row.target is None:
                self._advance(row, "drop", "a replica of the move is gone")
            elif row.status == SWITCHING:
                self._switch(row)
        self._begin(now)

    def _limit(self, row: Relocation) -> timedelta:
        policy = self._policy
        seconds = {
            PLANNED: policy.planned_seconds,
            SENDING: policy.send_seconds + policy.answer_seconds,
            SWITCHING: policy.switch_seconds,
        }
        return timedelta(seconds=seconds[row.status])

    # -- the swap --------------------------------------------------------------------------------
    def _switch(self, row: Relocation) -> None:
        """Have the next turn go to the target, if nothing came between."""
        model, session_id, target = row.session.model_name, row.session.session_id, str(row.target_id)
        pin = self._pins.find(model, session_id, [target])
        if pin is None:
            self._advance(row, "drop", "the session table has forgotten it")
        elif (pin.owner, pin.owner_epoch) == (target, row.owner_epoch + 1):
            self._finish(row)  # a leader died between the swap and its record
        elif (pin.owner_epoch, pin.turns) != (row.owner_epoch, row.turns):
            self._advance(row, "drop", "a turn or a gateway came between")
        elif row.target is None or not takes_sessions(row.target):
            self._advance(row, "drop", "the target takes no conversations any more")
        else:
            after = self._pins.repin(model, session_id, target, row.owner_epoch, row.turns)
            if after.owner == target:
                self._finish(row)
            else:
                self._advance(row, "drop", "a turn or a gateway came between")

    def _finish(self, row: Relocation) -> None:
        self._advance(row, "repinned", row.reason or "the next turn goes to the target")
        order = self._order(row)
        if order is not None:
            epoch = self._state.node(order.source_node_id).lease_epoch
            self._link.let_session_go(order, lease_epoch=epoch)

    # -- the beginning ---------------------------------------------------------------------------
    def _begin(self, now: datetime) -> None:
        levels = time.monotonic() - self._levelled_seconds >= self._policy.balance_every_seconds
        busy: set[int] = set()
        for number in range(self._policy.rounds):
            fleet = movable_fleet(now=now, rooms=self._rooms, levels=levels, in_turn=busy)
            plan = plan_relocations(fleet, self._pace.budget(time.monotonic()))
            if levels and not number:
                self._levelled_seconds = time.monotonic()
                record_balance(dict(plan.notes), actor=ACTOR, now=now)
            if not self._carry_out(plan, busy, now):
                return

    def _carry_out(self, plan: RelocationPlan, busy: set[int], now: datetime) -> bool:
        """Begin what is planned; says whether a place is free again: it is busy, or has moved already."""
        waiting = {str(row.session_id): row for row in live_relocations() if row.status == PLANNED}
        sessions = InferenceSession.objects.in_bulk([int(move.session_id) for move in plan.moves])
        has_room = False
        for move in plan.moves:
            session = sessions.get(int(move.session_id))
            if session is None:
                continue
            pin = self._pins.find(session.model_name, session.session_id, [move.source_id])
            if pin is not None and _turn_runs(session, pin):
                busy.add(session.pk)
                has_room = True
                continue
            row = waiting.get(move.session_id) or self._record(move, now)
            has_room |= row is not None and self._start(row, move, pin)
        self._note_stays(plan, waiting)
        return has_room

    def _record(self, move: PlannedMove, now: datetime) -> Relocation | None:
        try:
            planned = plan_move(move, actor=ACTOR, now=now)
        except ConflictError as error:
            _log.info("event=move_overtaken session=%s error=%s", move.session_id, error)
            return None
        return next((row for row in live_relocations() if row.pk == planned.pk), None)

    def _start(self, row: Relocation, move: PlannedMove, pin: Pin | None) -> bool:
        """Begin a move; says whether it is over already."""
        order = self._order(row)
        if pin is None or pin.owner != move.source_id:
            return self._advance(row, "drop", "the session table does not have it at its source")
        if order is None:
            return self._advance(row, "drop", "a replica of the move has no place now")
        facts: dict[str, int | float | str] = {
            "owner_epoch": pin.owner_epoch,
            "turns": pin.turns,
            "way": move.estimate.way,
        }
        order = replace(order, computes=move.estimate.way == PREFILL)
        view = self._state.node(order.source_node_id)
        if move.estimate.way == RECOMPUTE or view.liveness == DEAD:
            facts["way"], row.reason = RECOMPUTE, "the target computes it again"
            if self._advance(row, "skip_sending", row.reason, **facts):
                row.owner_epoch, row.turns = pin.owner_epoch, pin.turns
                self._switch(row)
            return True
        if self._advance(row, "send", move.estimate.sentence(), **facts):
            self._pace.take(move.estimate.kv_bytes)
            # After the record: a leader that dies here leaves a move that ends by its time.
            self._link.move_session(order, lease_epoch=view.lease_epoch, command_id=move_command(str(row.pk)))
        return False

    def _note_stays(self, plan: RelocationPlan, waiting: Mapping[str, Relocation]) -> None:
        """Say beside what waits for its turn what it waits for."""
        for stay in plan.stays:
            row = waiting.get(stay.session_id)
            if row is not None and row.reason != stay.why:
                note_wait(row.pk, stay.why)

    def _rooms(self, node_ids: Collection[str]) -> dict[str, ReplicaRoom]:
        """What the replicas of these nodes report."""
        return {
            seen.replica_id: room_of(
                load.kv_total_blocks, load.kv_block_tokens, load.kv_used_ratio, load.requests_waiting
            )
            for view, seen in self._state.observed()
            if view.node_id in node_ids and (load := seen.load) is not None
        }

    def _order(self, row: Relocation) -> MoveOrder | None:
        """What the agents are told by; `None` where an end has no place now."""
        source, target = row.source, row.target
        if source is None or target is None or source.node_id is None or target.node_id is None:
            return None
        if not target.address:
            return None  # it is being launched anew
        return MoveOrder(
            relocation_id=str(row.pk),
            session_id=row.session.session_id,
            source_node_id=str(source.node_id),
            source_id=str(source.pk),
            source_attempt=source.attempt,
            target_node_id=str(target.node_id),
            target_id=str(target.pk),
            target_attempt=target.attempt,
            target_address=target.address,
            seconds=self._policy.send_seconds,
            bytes_per_second=float(self._policy.limits.bytes_per_second),
        )

    def _advance(self, row: Relocation, event: str, reason: str, **facts: int | float | str) -> bool:
        """Record an event; `False` where an agent's answer was recorded first."""
        try:
            advance_relocation(row.pk, event, reason=reason, actor=ACTOR, now=clock.now(), **facts)
        except IllegalTransitionError as error:
            _log.info("event=move_overtaken relocation=%s error=%s", row.pk, error)
            return False
        return True


def _turn_runs(session: InferenceSession, pin: Pin) -> bool:
    """Whether a turn has begun since the last one that is recorded had ended."""
    return pin.turn_began_seconds > session.last_turn_at.timestamp() + _CLOCKS_SECONDS
