"""A fleet of any size with a virtual clock, on which a rollout is driven by its real decisions.

What a deployment's own plan does with a replica that makes way (start a successor beside it, or let it go
and start one in its place, and replace what is lost) is modelled here, since the real one looks at every
accelerator of the fleet each time; `tests/rollouts/test_rollout_fleet.py` runs the two
together.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

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
from exaserve_ops.rollouts.domain.driving import decide
from exaserve_ops.rollouts.domain.gates import Answers
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT, WAVE
from exaserve_ops.rollouts.domain.policy import RolloutPolicy, resolve
from exaserve_ops.rollouts.domain.spread_of_values import bucket_of
from exaserve_ops.rollouts.domain.view import RolloutView, Seat, WaveState
from exaserve_ops.rollouts.domain.waves import Candidate, plan_waves

START = datetime(2026, 1, 1, tzinfo=UTC)
OLD, NEW = "release-1", "release-2"
LOAD_SECONDS = 40
END_SECONDS = 10
FAIL_SECONDS = 20
DETECT_SECONDS = 4


@dataclass(eq=False)
class Machine:
    """One node."""

    name: str
    domain: str
    slots: int
    alive: bool = True
    silent_seconds: int = 0
    slow: bool = False
    """Whatever starts here takes four times as long."""


@dataclass(eq=False)
class Copy:
    """One replica with its process."""

    id: str
    release: str
    machine: Machine | None
    born_seconds: int
    replaces: str = ""
    status: str = "pending"
    wanted: bool = True
    rolls_to: str = ""
    in_place: bool = False
    leaving_since: datetime | None = None
    ends_seconds: int = 0
    failed_at: datetime | None = None


@dataclass
class RolloutWorld:
    """Ticks in coarse steps; `bad` says what is wrong with the new release."""

    chance: random.Random
    machines: list[Machine]
    wanted: int
    policy: RolloutPolicy
    bad: str = ""
    """Empty, `crash` (never starts), `error` (answers fail) or `slow` (answers late)."""
    bad_from: int = 0
    """It shows only once so many waves have passed."""
    now_seconds: int = 0
    status: str = states.RUNNING
    why: str = ""
    copies: dict[str, Copy] = field(default_factory=dict)
    waves: list[WaveState] = field(default_factory=list)
    waits_for: str = ""
    touched: dict[int, set[str]] = field(default_factory=dict)
    """Failure domains in which replicas of the old release were let go, by wave."""
    most_missing: int = 0
    """By the rollout's own doing, on top of what was missing then."""
    lost_reports_until: int = 0
    _load: Counter[Machine] = field(default_factory=Counter)
    _requests: dict[str, int] = field(default_factory=lambda: {OLD: 0, NEW: 0})
    _wave_since: dict[str, int] = field(default_factory=lambda: {OLD: 0, NEW: 0})
    _seats: dict[str, tuple[tuple[object, ...], Seat]] = field(default_factory=dict)
    _made: int = 0

    def __post_init__(self) -> None:
        self.surge = resolve(self.policy.max_surge, self.wanted)
        self.unavailable = resolve(self.policy.max_unavailable, self.wanted)
        for index in range(self.wanted):
            copy = self._make(OLD)
            copy.machine = self.machines[index % len(self.machines)]
            copy.status = "ready"
        planned = plan_waves(self._candidates(), self.policy)
        if not (self.surge and self._has_room()):
            self.unavailable = max(1, self.unavailable)
        self.waves = [self._wave(wave.number, wave.domain, len(wave.replica_ids)) for wave in planned]

    @property
    def now(self) -> datetime:
        return START + timedelta(seconds=self.now_seconds)

    @property
    def shown(self) -> str:
        """What is wrong with the new release by now."""
        passed = sum(wave.status == states.PASSED for wave in self.waves)
        return self.bad if passed >= self.bad_from else ""

    # -- time ----------------------------------------------------------------------------------------
    def tick(self, seconds: int) -> None:
        self.now_seconds += seconds
        for machine in self.machines:
            machine.silent_seconds = 0 if machine.alive else machine.silent_seconds + seconds
        self._run_processes()
        self._heal()
        self._answer(seconds)

    def _run_processes(self) -> None:
        for copy in self.live():
            machine = copy.machine
            if machine is None or not machine.alive:
                if machine is not None and self._is_lost(machine) and copy.status != "stopped":
                    copy.status = "unreachable" if copy.wanted else copy.status
                continue
            if not copy.wanted:
                if copy.status != "stopped" and self.now_seconds >= copy.ends_seconds:
                    copy.status = "stopped"
            elif copy.status in {"placed", "loading", "unreachable"}:
                self._load_on(copy, machine)

    def _load_on(self, copy: Copy, machine: Machine) -> None:
        age = self.now_seconds - copy.born_seconds
        if copy.release == NEW and self.shown == "crash" and age >= FAIL_SECONDS:
            copy.status, copy.failed_at = "failed", copy.failed_at or self.now
        elif age >= LOAD_SECONDS * (4 if machine.slow else 1):
            copy.status = "ready"
        else:
            copy.status = "loading"

    def live(self) -> list[Copy]:
        """Replicas that have not ended."""
        return [c for c in self.copies.values() if c.status != "stopped"]

    def _is_lost(self, machine: Machine) -> bool:
        return machine.silent_seconds >= DETECT_SECONDS

    # -- what the deployment's own plan does -----------------------------------------------------------
    def _heal(self) -> None:
        live = self.live()
        self._load = Counter(c.machine for c in live if c.machine is not None)
        covered = {c.replaces: c for c in live if c.wanted and c.replaces}
        for copy in live:
            if copy.wanted:
                self._make_way(copy, covered.get(copy.id))
        self._count()
        for copy in self.live():
            if copy.wanted and copy.machine is None and (place := self._place()) is not None:
                copy.machine, copy.status, copy.born_seconds = place, "placed", self.now_seconds
                self._load[place] += 1

    def _make_way(self, copy: Copy, successor: Copy | None) -> None:
        ails = copy.status in {"unreachable", "failed"}
        if successor is not None:
            if ails and successor.status == "ready":
                self.let_go(copy)
            return
        target = copy.rolls_to or copy.release
        if copy.rolls_to and (copy.in_place or copy.status not in {"ready", "unreachable"}):
            self.let_go(copy)
            self._make(target, replaces=copy.id)
        elif (copy.rolls_to or ails) and not self._tried_in_vain(target):
            place = self._place()
            if place is not None:
                made = self._make(target, replaces=copy.id)
                made.machine, made.status = place, "placed"
                self._load[place] += 1

    def _tried_in_vain(self, release: str) -> bool:
        return release == NEW and any(c.failed_at for c in self.copies.values() if c.release == NEW)

    def _count(self) -> None:
        """One that makes way or ails and its successor are one; who is too many goes."""
        kept = [c for c in self.live() if c.wanted]
        by_id = {c.id: c for c in kept}
        ailing = {c.id for c in kept if c.rolls_to or c.status in {"unreachable", "failed"}}
        covered = {c.replaces for c in kept if c.replaces in ailing}
        heads = [c for c in kept if c.id not in covered]
        heads.sort(key=lambda c: (c.status == "ready", not c.rolls_to, c.id))
        surplus = len(heads) - self.wanted
        for copy in heads[: max(0, surplus)]:
            self.let_go(copy)
            if copy.replaces in covered and copy.replaces in by_id:
                self.let_go(by_id[copy.replaces])
        for _ in range(-surplus):
            self._make(OLD)

    def _place(self) -> Machine | None:
        open_to = [m for m in self.machines if m.alive and not m.silent_seconds and self._load[m] < m.slots]
        return min(open_to, key=lambda m: (self._load[m] - m.slots, m.name), default=None)

    def _has_room(self) -> bool:
        load = Counter(c.machine for c in self.copies.values() if c.machine and c.status != "stopped")
        return any(m.alive and load[m] < m.slots for m in self.machines)

    def _make(self, release: str, replaces: str = "") -> Copy:
        self._made += 1
        name = f"r{self._made:06}"
        copy = Copy(name, release, None, self.now_seconds, replaces)
        self.copies[copy.id] = copy
        return copy

    def let_go(self, copy: Copy) -> None:
        copy.wanted, copy.ends_seconds = False, self.now_seconds + END_SECONDS
        if copy.machine is None:
            copy.status = "stopped"

    # -- what gateways count ---------------------------------------------------------------------------
    def _answer(self, seconds: int) -> None:
        for copy in self.live():
            if copy.wanted and copy.status == "ready":
                self._requests[copy.release] += seconds

    def answers(self, release: str) -> Answers:
        count = min(500, self._requests[release] - self._wave_since[release])
        late = release == NEW and self.shown == "slow"
        failed = count // 3 if release == NEW and self.shown == "error" else 0
        buckets = {bucket_of(4.0 if late else 0.3): count} if count else {}
        return Answers(count, failed, {"stream:64": buckets}, {bucket_of(0.02): count} if count else {})

    # -- the controller --------------------------------------------------------------------------------
    def drive(self, *, dies_after: int | None = None) -> None:
        """One look; a controller that dies carries out only the first actions."""
        if self.now_seconds < self.lost_reports_until:
            return
        view = self.view()
        for count, action in enumerate(decide(view, self.now)):
            if count == dies_after:
                return
            if isinstance(action, Roll) and action.in_place:
                self._count_taken(view, action)
            self._take(action)

    def _count_taken(self, view: RolloutView, action: Roll) -> None:
        """How many are missing once these have gone, by whatever cause: a rollout adds to it only so far."""
        serving = [seat for seat in view.seats if seat.is_ready and seat.serves]
        taken = sum(seat.in_place or seat.replica_id in action.replica_ids for seat in serving)
        if taken:
            self.most_missing = max(self.most_missing, view.missing + taken)

    def view(self) -> RolloutView:
        wave = next((w for w in self.waves if w.status != states.PASSED), None)
        failed = [c for c in self.copies.values() if c.release == NEW and c.failed_at]
        wave_ids = frozenset(wave.members) if wave is not None else frozenset()
        return RolloutView(
            id="rollout",
            status=self.status,
            policy=self.policy,
            old_release=OLD,
            new_release=NEW,
            wanted=self.wanted,
            surge=self.surge,
            unavailable=self.unavailable,
            seats=tuple(
                self._seat(c) for c in self.copies.values() if c.status != "stopped" or c.id in wave_ids
            ),
            waves=tuple(self.waves),
            running_since=START,
            move_seconds=3600.0,
            new_answers=self.answers(NEW),
            old_answers=self.answers(OLD),
            failed=tuple(f"{c.id}: it failed" for c in failed),
            has_surge_room=self._has_room(),
        )

    def _seat(self, copy: Copy) -> Seat:
        """What is seen of a replica; made anew only where something changed, since there are thousands."""
        machine = copy.machine
        lost = machine is not None and self._is_lost(machine)
        marks = (copy.status, copy.wanted, lost, copy.rolls_to, copy.in_place, copy.leaving_since)
        known = self._seats.get(copy.id)
        if known is not None and known[0] == (machine, *marks):
            return known[1]
        seat = Seat(
            replica_id=copy.id,
            name=copy.id,
            release=copy.release,
            status=copy.status,
            is_wanted=copy.wanted and copy.status != "stopped",
            domain=machine.domain if machine else "",
            node_id=machine.name if machine else "",
            node_name=machine.name if machine else "",
            node_alive=not lost,
            rolls_to=copy.rolls_to,
            in_place=copy.in_place,
            replaces=copy.replaces,
            leaving_since=copy.leaving_since,
        )
        self._seats[copy.id] = ((machine, *marks), seat)
        return seat

    def _take(self, action: Action) -> None:  # noqa: C901, PLR0912 - one case an action
        match action:
            case MoveRollout(event=event, why=why):
                self.status, self.why = ROLLOUT.next(self.status, event), why
            case MoveWave():
                self._move_wave(action)
            case AddWaves():
                planned = plan_waves(self._candidates(), self.policy, begun=len(self.waves))
                self.waves += [self._wave(w.number, w.domain, len(w.replica_ids)) for w in planned]
            case Roll(replica_ids=ids, release=release, in_place=in_place):
                for copy in self._kept(ids):
                    copy.rolls_to, copy.in_place = release, in_place
                    self._touch(copy)
            case Stay(replica_ids=ids):
                for copy in self._kept(ids):
                    copy.rolls_to, copy.in_place, copy.leaving_since = "", False, None
            case Leave(replica_ids=ids):
                for copy in self._kept(ids):
                    copy.leaving_since = copy.leaving_since or self.now
            case LetGo(replica_ids=ids):
                for copy in self._kept(ids):
                    self.let_go(copy)
            case Wait(why=why):
                self.waits_for = why
            case NoteGates():
                pass

    def _touch(self, copy: Copy) -> None:
        wave = next((w for w in self.waves if w.status != states.PASSED), None)
        if wave is not None and copy.release == OLD and copy.machine is not None:
            self.touched.setdefault(wave.number, set()).add(copy.machine.domain)

    def _kept(self, ids: tuple[str, ...]) -> list[Copy]:
        return [self.copies[key] for key in ids if self.copies[key].wanted]

    def _move_wave(self, action: MoveWave) -> None:
        index = action.number - 1
        wave = self.waves[index]
        changes: dict[str, object] = {"status": WAVE.next(wave.status, action.event), "since": self.now}
        if action.event == "open":
            changes |= {"members": action.members, "mode": action.mode}
        self.waves[index] = replace(wave, **changes)  # type: ignore[arg-type]  # fields of a wave
        self._wave_since = dict(self._requests)

    def _wave(self, number: int, domain: str, planned: int) -> WaveState:
        soak = self.policy.canary_soak_seconds if number == 1 else self.policy.soak_seconds
        return WaveState(number, states.WAITING, domain, planned, soak, needs_approval=False, since=self.now)

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(c.id, c.id, c.machine.domain if c.machine else "")
            for c in self.copies.values()
            if c.wanted and c.release == OLD and c.status != "stopped"
        ]

    # -- what must hold --------------------------------------------------------------------------------
    def releases(self) -> Counter[str]:
        return Counter(c.release for c in self.copies.values() if c.wanted and c.status != "stopped")

    def picture(self) -> str:
        waves = [(w.number, w.status, w.domain, w.planned, w.mode) for w in self.waves]
        odd = [
            (c.id, c.release, c.status, c.wanted, c.rolls_to, c.in_place, c.replaces)
            for c in self.copies.values()
            if c.status not in {"ready", "stopped"} or (c.rolls_to and c.wanted)
        ]
        return (
            f"{self.status} ({self.why}); waits for {self.waits_for}; {self.releases()}; {waves}; {odd[:12]}"
        )


def machines(domains: int, each: int, slots: int) -> list[Machine]:
    return [
        Machine(f"n{domain:02}-{index:03}", f"rack r{domain:02}", slots)
        for domain in range(domains)
        for index in range(each)
    ]
