"""A rollout over a fleet of any size in virtual time, driven by its real decisions.

What the product's services do in a transaction each is done here to plain records: the same guards, the
same lifecycles. Controllers look, act, die and come too late; rules that must hold are asked about each
action before it is carried out (`tests/fakes/rollout_rules.py`).
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.rollouts.domain import driving
from exaserve_ops.rollouts.domain import lifecycle as states
from exaserve_ops.rollouts.domain.actions import (
    Action,
    AddWaves,
    Leave,
    LetGo,
    MoveRollout,
    MoveWave,
    NoteGates,
    Roll,
    Stay,
    Wait,
)
from exaserve_ops.rollouts.domain.gates import Answers
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT, WAVE
from exaserve_ops.rollouts.domain.policy import RolloutPolicy, longest_move_seconds, resolve
from exaserve_ops.rollouts.domain.spread_of_values import Buckets, bucket_of
from exaserve_ops.rollouts.domain.view import IN_PLACE, RolloutView, Seat, WaveState, WeightsUnderWay
from exaserve_ops.rollouts.domain.waves import Candidate, PlannedWave, plan_waves
from exaserve_ops.serving.domain.facts import SERVING, STANDBY
from exaserve_ops.serving.domain.lifecycle import READY, STOPPED
from exaserve_ops.serving.domain.placement import PlacementBoard, Refusal
from tests.fakes.rollout_fleet import RolloutFleet
from tests.fakes.rollout_records import (
    DRAIN_SECONDS,
    NEW,
    OLD,
    REQUEST,
    START_SECONDS,
    Machine,
    Overtaken,
    Row,
    at,
)
from tests.fakes.rollout_rules import Rules

ENDED_STATUSES = ROLLOUT.final
_REQUESTS_PER_SECOND = 0.2
_MOST_ANSWERS = 5000
KIND = "stream:64"
"""Of answers: only those of one kind are compared."""
_FINE = {bucket_of(0.3): 0.9, bucket_of(0.45): 0.1}
"""Share of answers by time to their first token."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one controller saw, and what it set out to do about it."""

    epoch: int
    view: RolloutView
    actions: tuple[Action, ...]


@dataclass
class RolloutWorld:
    """One rollout; `bad` says what is wrong with the new release."""

    chance: random.Random
    fleet: RolloutFleet
    policy: RolloutPolicy
    bad: str = ""
    """Empty, `crash` (never starts), `hang` (starts without end), `error` (answers fail), `slow` (answers
    late) or `spoilt` (its weights are not what they should be)."""
    bad_from: int = 0
    """It shows only once so many waves have passed."""
    has_traffic: bool = True
    is_fenced: bool = True
    """Whether what a deposed leader still tries is refused."""
    status: str = states.RUNNING
    status_seconds: int = 0
    why: str = ""
    waits_for: str = ""
    waves: list[WaveState] = field(default_factory=list)
    epoch: int = 1
    rules: Rules = field(default_factory=Rules)
    outcomes: Counter[str] = field(default_factory=Counter)
    """How often what happened to actions: carried out, overtaken, fenced off, done twice."""
    _requests: dict[str, float] = field(default_factory=lambda: {OLD: 0.0, NEW: 0.0})
    _wave_since: dict[str, float] = field(default_factory=lambda: {OLD: 0.0, NEW: 0.0})
    _seats: dict[str, Seat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.surge = resolve(self.policy.max_surge, self.fleet.wanted)
        self.unavailable = resolve(self.policy.max_unavailable, self.fleet.wanted)
        self.fleet.snapshot()
        if not (self.surge and self._has_room()):
            self.unavailable = max(1, self.unavailable)
        self.waves = self._recorded(plan_waves(self._candidates(), self.policy, width=self.width))
        self.canary = self.waves[0].planned
        self._keep_old_weights(row.machine for row in self.fleet.rows.values())

    @property
    def now(self) -> datetime:
        return self.fleet.now

    @property
    def width(self) -> int:
        """How many may make way at once."""
        return max(self.surge, self.unavailable)

    @property
    def wave(self) -> WaveState | None:
        return next((wave for wave in self.waves if wave.status != states.PASSED), None)

    # -- time ----------------------------------------------------------------------------------------
    def tick(self, seconds: int) -> None:
        passed = sum(wave.status == states.PASSED for wave in self.waves)
        self.fleet.bad = self.bad if passed >= self.bad_from else ""
        self.fleet.tick(seconds)
        if self.has_traffic:
            for release in (OLD, NEW):
                self._requests[release] += self.fleet.answering[release] * seconds * _REQUESTS_PER_SECOND

    def answers(self, release: str) -> Answers:
        """What a release answered since its wave is as it is."""
        count = min(_MOST_ANSWERS, int(self._requests[release] - self._wave_since[release]))
        is_bad = release == NEW
        times = {bucket_of(4.0): 1.0} if is_bad and self.fleet.bad == "slow" else _FINE
        failed = count // 3 if is_bad and self.fleet.bad == "error" else 0
        return Answers(count, failed, {KIND: _spread(times, count)}, _spread({bucket_of(0.02): 1.0}, count))

    # -- the controller --------------------------------------------------------------------------------
    def look(self) -> Look:
        view = self.view()
        actions = tuple(driving.decide(view, self.now))
        return Look(self.epoch, view, actions)

    def carry_out(self, look: Look, *, most: int | None = None, twice: bool = False) -> None:
        """Carry out what was decided; one that dies does so after `most` actions."""
        for action in look.actions[:most]:
            if self.is_fenced and look.epoch < self.epoch:
                self.outcomes["fenced off"] += 1
                return
            self.rules.before(self, look.view, action)
            try:
                self._take(look.view, action)
            except (Overtaken, IllegalTransitionError):
                self.outcomes["overtaken"] += 1
                return
            self.outcomes["carried out"] += 1
            if twice:
                self._once_more(look.view, action)

    def _once_more(self, view: RolloutView, action: Action) -> None:
        before = self._marks(action)
        with contextlib.suppress(Overtaken, IllegalTransitionError):
            self._take(view, action)
        self.outcomes["done twice"] += 1
        self.rules.after_twice(self, action, before, self._marks(action))

    def _marks(self, action: Action) -> object:
        """All that an action may change."""
        rows = [self._row(key) for key in getattr(action, "replica_ids", ())]
        marks = [(r.rolls_to, r.in_place, r.leaving_since, r.wanted, r.status, r.targets) for r in rows]
        return (self.status, self.status_seconds, len(self.waves), tuple(self.waves), marks)

    # -- what it sees ----------------------------------------------------------------------------------
    def view(self) -> RolloutView:
        fleet, wave = self.fleet, self.wave
        self._refresh_seats()
        ended = [fleet.ended[key] for key in (wave.members if wave is not None else ()) if key in fleet.ended]
        began = self.status_seconds
        failed = {
            row.id: row
            for row in fleet.failed
            if row.failed_seconds is not None and row.failed_seconds >= began and row.release == NEW
        }
        looks_for_room = self.status == states.ROLLING_BACK or (
            wave is not None and wave.status == states.WAITING
        )
        return RolloutView(
            id="rollout",
            status=self.status,
            policy=self.policy,
            old_release=OLD,
            new_release=NEW,
            wanted=fleet.wanted,
            surge=self.surge,
            unavailable=self.unavailable,
            seats=(*self._seats.values(), *(self._seat(row) for row in ended)),
            waves=tuple(self.waves),
            running_since=at(self.status_seconds),
            move_seconds=self._move_seconds(wave),
            start_seconds=START_SECONDS,
            new_answers=self.answers(NEW),
            old_answers=self.answers(OLD),
            failed=tuple(f"{row.id}: {row.gave_up}" for row in failed.values()),
            weights=self._weights_under_way(wave),
            frozen=fleet.frozen,
            has_surge_room=bool(self.surge) and looks_for_room and self._has_room(),
        )

    def _refresh_seats(self) -> None:
        for key, row in self.fleet.changed_seats.items():
            if row.status == STOPPED:
                self._seats.pop(key, None)
            else:
                self._seats[key] = self._seat(row)
        self.fleet.changed_seats.clear()

    def _seat(self, row: Row) -> Seat:
        machine, room = row.machine, row.machine.room if row.machine is not None else None
        return Seat(
            replica_id=row.id,
            name=row.id,
            release=row.release,
            status=row.status,
            is_wanted=row.is_kept,
            domain=room.domain if room is not None else "",
            node_id=machine.name if machine is not None else "",
            node_name=machine.name if machine is not None else "",
            node_alive=not machine.is_lost if machine is not None else row.status == "pending",
            serves=row.role == SERVING,
            is_closed=row.status == READY and self.fleet.now_seconds < row.opens_seconds,
            rolls_to=row.rolls_to,
            in_place=row.in_place,
            replaces=row.replaces,
            leaving_since=row.leaving_since,
            sessions_left=row.sessions if row.leaving_since is not None else 0,
            active_sessions=row.sessions,
            reason=row.reason,
            restarts=row.restarts,
            since=at(row.status_seconds),
        )

    def _move_seconds(self, wave: WaveState | None) -> float:
        in_place = wave is not None and wave.mode == IN_PLACE
        width = self.unavailable if in_place else self.surge
        each_seconds = float(START_SECONDS + DRAIN_SECONDS)
        return longest_move_seconds(wave.planned if wave is not None else 1, width, each_seconds, self.policy)

    def _has_room(self) -> bool:
        self.fleet.snapshot()
        rooms = [machine.room for machine in self.fleet.machines if machine.room is not None]
        board = PlacementBoard(REQUEST, rooms)
        return not isinstance(board.place(standby=False), Refusal)

    def _weights_under_way(self, wave: WaveState | None) -> WeightsUnderWay:
        unready = self._bring_weights(wave)
        spoilt = dict.fromkeys(unready, "a shard is not what its manifest says")
        return WeightsUnderWay(unready, spoilt if self.fleet.bad == "spoilt" else {})

    def _bring_weights(self, wave: WaveState | None) -> dict[str, str]:
        """Claim the new weights on the nodes of the wave that is prewarmed; says what is missing."""
        if wave is None or wave.status != states.PREWARMING or self.status != states.RUNNING:
            return {}
        missing: dict[str, str] = {}
        for machine in {row.machine for row in map(self._row, wave.members) if row.machine is not None}:
            self.fleet.claims.setdefault(machine, set()).add(NEW)
            if why := self.fleet.why_not_whole(machine, NEW):
                missing[machine.name] = why
        return missing

    def _keep_old_weights(self, machines: Iterable[Machine | None]) -> None:
        for machine in machines:
            if machine is not None:
                self.fleet.claims.setdefault(machine, set()).add(OLD)

    # -- what it does ----------------------------------------------------------------------------------
    def _take(self, view: RolloutView, action: Action) -> None:
        match action:
            case MoveRollout(event=event, why=why):
                self._finish(event)
                self.advance(event, why)
            case MoveWave():
                self._move_wave(action)
            case AddWaves():
                if self.wave is not None:
                    raise Overtaken("there is a wave left")
                planned = plan_waves(self._candidates(), self.policy, begun=len(self.waves), width=self.width)
                self.waves += self._recorded(planned)
            case Wait(why=why):
                self.waits_for = why
            case NoteGates():
                pass
            case _:
                if self.status != view.status:
                    raise Overtaken(f"the rollout is {self.status} by now")
                self._move_replicas(action)

    def _move_replicas(self, action: Roll | Stay | Leave | LetGo) -> None:
        kept = [row for row in map(self._row, action.replica_ids) if row.wanted == "run"]
        match action:
            case Roll(release=release, in_place=in_place):
                self.fleet.roll(kept, release, in_place=in_place)
            case Stay():
                self.fleet.ask_to_leave(kept, None, ())
                self.fleet.roll(kept, "", in_place=False)
            case Leave(targets=targets):
                self.fleet.ask_to_leave(kept, self.now, targets)
            case LetGo():
                self.fleet.drain(kept)

    def advance(self, event: str, why: str) -> None:
        """Move the rollout on by one event. Raises `IllegalTransitionError`."""
        self.status, self.why, self.waits_for = ROLLOUT.next(self.status, event), why, ""
        self.status_seconds = self.fleet.now_seconds
        if self.status in ENDED_STATUSES:
            self.fleet.claims.clear()

    def resume(self, why: str) -> None:
        """A person lets it go on: past the wave that waited for it, and with its deadlines anew."""
        self.advance("resume", why)
        for index, wave in enumerate(self.waves):
            if wave is self.wave:
                since = wave.since if wave.status == states.FAILED else self.now
                self.waves[index] = replace(wave, needs_approval=False, since=since)
                self._wave_since = dict(self._requests)
                return

    def _finish(self, event: str) -> None:
        if event not in {"finish", "finish_back"}:
            return
        ROLLOUT.next(self.status, event)
        release = NEW if event == "finish" else OLD
        if any(row.release != release for row in self.fleet.rows.values() if row.is_kept):
            raise Overtaken("a replica of the other release was made meanwhile")
        self.fleet.release = release

    def _move_wave(self, action: MoveWave) -> None:
        index = action.number - 1
        wave = self.waves[index]
        status = WAVE.next(wave.status, action.event)
        moved = replace(wave, status=status, since=self.now, why=action.why)
        if action.event == "open":
            moved = replace(moved, members=action.members, mode=action.mode)
            old = (row for row in self.fleet.rows.values() if row.release == OLD and row.is_kept)
            self._keep_old_weights(row.machine for row in old)
        if action.event == "reopen":
            moved = replace(moved, members=())
        self.waves[index] = moved
        self._wave_since = dict(self._requests)

    def _row(self, key: str) -> Row:
        return self.fleet.rows.get(key) or self.fleet.ended[key]

    def _recorded(self, planned: Iterable[PlannedWave]) -> list[WaveState]:
        return [
            WaveState(
                wave.number,
                states.WAITING,
                wave.domain,
                len(wave.replica_ids),
                wave.soak_seconds,
                wave.needs_approval,
                self.now,
                domains=wave.domains,
            )
            for wave in planned
        ]

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(
                row.id,
                row.id,
                row.machine.room.domain if row.machine is not None and row.machine.room is not None else "",
                row.machine.name if row.machine is not None else "",
                row.sessions,
                is_standby=row.role == STANDBY,
            )
            for row in self.fleet.rows.values()
            if row.is_kept and row.release == OLD
        ]

    # -- for people ------------------------------------------------------------------------------------
    def releases(self) -> Counter[str]:
        return Counter(row.release for row in self.fleet.rows.values() if row.is_kept)

    def picture(self) -> str:
        waves = [
            (w.number, w.status, w.domain, w.planned, w.mode) for w in self.waves if w.status != "passed"
        ]
        odd = [
            (
                r.id,
                r.release,
                r.status,
                r.wanted,
                r.rolls_to,
                r.in_place,
                r.replaces,
                r.reason or r.healing_note,
            )
            for r in self.fleet.rows.values()
            if r.status != READY or (r.rolls_to and r.wanted == "run")
        ]
        return (
            f"{self.status} after {self.fleet.now_seconds} s ({self.why}); waits for {self.waits_for}; "
            f"{dict(self.releases())} of {self.fleet.wanted}; waves left {waves[:4]}; {odd[:12]}"
        )


def _spread(shares: dict[int, float], count: int) -> Buckets:
    return {bucket: number for bucket, share in shares.items() if (number := round(share * count))}
