"""Nodes, agents and the failure detector of a simulated deployment, with a virtual clock.

Agents act on the wish that reached them last, and what they see is recorded when their report arrives. Only
what changed is looked at again, so that thousands of replicas can be followed through a thousand rollouts.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import ReplicaFacts
from exaserve_ops.serving.domain.lifecycle import REPLICA
from tests.fakes.rollout_records import (
    END_SECONDS,
    FAIL_SECONDS,
    FETCH_SECONDS,
    LOAD_SECONDS,
    NEW,
    OLD,
    START_SECONDS,
    Machine,
    Row,
    at,
)


@dataclass
class RolloutNodes:
    """What runs, what is seen of it, and what has changed since it was looked at last."""

    chance: random.Random
    machines: list[Machine]
    wanted: int
    standbys: int = 0
    now_seconds: int = 0
    frozen: str = ""
    release: str = OLD
    """Which one new replicas have."""
    bad: str = ""
    """What is wrong with the new release by now: empty, `crash`, `hang`, `error`, `slow`, `spoilt`."""
    rows: dict[str, Row] = field(default_factory=dict)
    """Those that have not ended."""
    ended: dict[str, Row] = field(default_factory=dict)
    answering: Counter[str] = field(default_factory=Counter)
    """How many serving replicas are ready, by release."""
    claims: dict[Machine, set[str]] = field(default_factory=dict)
    """Weights that the rollout keeps on nodes."""
    evicted: list[tuple[int, str, str]] = field(default_factory=list)
    """Second, node and release of weights that made room for others."""
    given_way: list[Row] = field(default_factory=list)
    """Serving ones that a rollout took away since this was last looked at."""
    failed: list[Row] = field(default_factory=list)
    """Those that their agents gave up, ever."""
    steps: Counter[str] = field(default_factory=Counter)
    changed_seats: dict[str, Row] = field(default_factory=dict)
    """Those that a rollout has to look at again."""
    _replacing: dict[str, list[str]] = field(default_factory=dict)
    _made: int = 0
    _failures: list[tuple[int, Machine, str]] = field(default_factory=list)
    _limited: list[int] = field(default_factory=list)
    """When replacements of failed ones were made."""
    _facts: dict[str, ReplicaFacts] = field(default_factory=dict)
    _changed: dict[str, Row] = field(default_factory=dict)
    _changed_machines: dict[str, Machine] = field(default_factory=dict)
    _unsettled: dict[str, Row] = field(default_factory=dict)
    _plan_is_due: bool = True

    # -- time ----------------------------------------------------------------------------------------
    @property
    def now(self) -> datetime:
        return at(self.now_seconds)

    @property
    def is_at_rest(self) -> bool:
        return not self._unsettled and not self._plan_is_due

    def tick(self, seconds: int) -> None:
        """Agents act and report, the detector sees."""
        self.now_seconds += seconds
        for machine in self.machines:
            if not machine.alive:
                self._miss(machine, seconds)
            elif machine.silent_seconds:
                machine.silent_seconds = 0
                self.touch_machine(machine)
        for row in list(self._unsettled.values()):
            if row.machine is not None and row.machine.alive:
                self._act(row, row.machine)
                self._report(row, row.machine)
            self._let_sessions_leave(row)
            if self.now_seconds - seconds < row.opens_seconds <= self.now_seconds:
                self.touch(row)
            elif self._is_settled(row):
                self._unsettled.pop(row.id, None)

    def _miss(self, machine: Machine, seconds: int) -> None:
        was_lost = machine.is_lost
        machine.silent_seconds += seconds
        if machine.is_lost and not was_lost:
            for row in list(machine.rows.values()):
                self._see(row, "node_lost")
        if not was_lost:
            self.touch_machine(machine)

    def _act(self, row: Row, machine: Machine) -> None:
        """What its agent does, with the wish that it knows."""
        if self.now_seconds >= machine.deaf_until:
            row.told = row.wanted
        if row.told == "run":
            self._keep_running(row, machine)
        elif row.told and row.ends_seconds is None and self._may_end(row):
            row.ends_seconds = self.now_seconds + (END_SECONDS if row.born_seconds is not None else 0)

    def _may_end(self, row: Row) -> bool:
        """Whether what drains is empty by now, or has had its time."""
        return row.told == "stop" or not row.sessions or self.now_seconds >= row.drain_until

    def _keep_running(self, row: Row, machine: Machine) -> None:
        if row.gave_up:
            return
        whole = machine.weights.get(row.release)
        if whole is None and not machine.disk:
            whole = machine.weights[row.release] = self.now_seconds + FETCH_SECONDS
        if whole is None or whole > self.now_seconds:
            return
        if row.born_seconds is None:
            row.born_seconds = self.now_seconds
        age = self.now_seconds - row.born_seconds
        if self._hangs(row) and age >= START_SECONDS:
            row.gave_up, row.born_seconds = f"not ready after {START_SECONDS} s", None
        elif row.release == NEW and self.bad == "crash" and age >= FAIL_SECONDS:
            row.gave_up, row.born_seconds = "it exited with status 1 three times", None

    def _hangs(self, row: Row) -> bool:
        return row.release == NEW and self.bad == "hang"

    def _report(self, row: Row, machine: Machine) -> None:
        if self.now_seconds >= machine.late_until:
            self._see(row, self._sighting(row, machine))

    def _sighting(self, row: Row, machine: Machine) -> str:
        if row.ends_seconds is not None:
            return "seen_stopped" if self.now_seconds >= row.ends_seconds else "seen_stopping"
        if row.gave_up:
            return "seen_failed"
        if not row.told or row.born_seconds is None:
            return "seen_waiting"
        if self.now_seconds < row.crashes_until:
            return "seen_backing_off"
        age = self.now_seconds - row.born_seconds
        load_seconds = LOAD_SECONDS * (4 if machine.is_slow else 1)
        is_up = age >= load_seconds and not self._hangs(row)
        return "seen_ready" if is_up else "seen_loading" if age else "seen_starting"

    def _see(self, row: Row, event: str) -> None:
        if REPLICA.allows(row.status, event):
            self.move(row, event, row.gave_up)

    def move(self, row: Row, event: str, reason: str = "") -> None:
        """One event of a replica's lifecycle. Raises `IllegalTransitionError`."""
        row.status = REPLICA.next(row.status, event)
        row.reason, row.status_seconds = reason, self.now_seconds
        if row.status == states.READY:
            row.opens_seconds = self.now_seconds + self.chance.choice((0, 0, 1, 5))
        if row.status == states.FAILED and row.machine is not None:
            row.failed_seconds = self.now_seconds
            self._failures.append((self.now_seconds, row.machine, row.release))
            self.failed.append(row)
        self.touch(row)

    # -- what a test breaks ----------------------------------------------------------------------------
    def crash(self, row: Row, *, gives_up: bool) -> None:
        """Its process ends by itself; its agent starts it again after a pause, or gives it up."""
        row.restarts += 1
        row.born_seconds = None
        row.crashes_until = self.now_seconds + 20
        if gives_up:
            row.gave_up = "it exited with status 1 three times"
        self.touch(row)

    def lose_power(self, machine: Machine) -> None:
        """All that runs there is gone."""
        machine.alive = False
        for row in machine.rows.values():
            row.born_seconds = None
            if row.ends_seconds is not None or row.told in {"drain", "stop"}:
                row.ends_seconds = self.now_seconds
        self.touch_machine(machine)

    def fill_disk(self, machine: Machine) -> None:
        """Weights that nobody claims and nothing runs from make room."""
        running = {row.release for row in machine.rows.values() if row.status != states.STOPPED}
        kept = running | self.claims.get(machine, set())
        for release in [one for one in machine.weights if one not in kept]:
            del machine.weights[release]
            self.evicted.append((self.now_seconds, machine.name, release))

    def why_not_whole(self, machine: Machine, release: str) -> str:
        """Why weights that are wanted on a node are not there yet; empty where they are."""
        whole = machine.weights.get(release)
        if whole is not None and whole <= self.now_seconds:
            return ""
        if not machine.alive:
            return "its store does not answer"
        if whole is None and not machine.disk and not (self.bad == "spoilt" and release == NEW):
            whole = machine.weights[release] = self.now_seconds + FETCH_SECONDS
        return machine.disk or "fetching"

    # -- sessions --------------------------------------------------------------------------------------
    def _let_sessions_leave(self, row: Row) -> None:
        """Between their turns; those of a process that is gone at once: their next turn goes elsewhere."""
        if not row.sessions:
            return
        gone = row.status in {states.STOPPED, states.FAILED, states.UNREACHABLE} or row.born_seconds is None
        asked = row.leaving_since is not None or row.status in {states.DRAINING, states.STOPPING}
        if gone:
            self._move_sessions(row, row.sessions)
        elif asked and self.chance.random() < 0.8:
            self._move_sessions(row, 1 if row.status == states.READY else row.sessions)

    def _move_sessions(self, row: Row, count: int) -> None:
        wished = [self.rows[key] for key in row.targets[:1] if key in self.rows]
        for target in [*wished, *self._some(8), *self.rows.values()]:
            if target is not row and target.answers and target.leaving_since is None:
                target.sessions += count
                row.sessions -= count
                self._note(target)
                self._note(row)
                return

    def _some(self, count: int) -> list[Row]:
        everybody = list(self.rows.values())
        return [self.chance.choice(everybody) for _ in range(count)] if everybody else []

    # -- what changed ----------------------------------------------------------------------------------
    def touch(self, row: Row) -> None:
        """Take note that a replica is not as it was."""
        if row.status == states.STOPPED and row.id in self.rows:
            self._end(row)
        counted = row.release if row.answers else ""
        if counted != row.counted:
            self.answering[row.counted] -= 1
            self.answering[counted] += 1
            row.counted = counted
        self._note(row)
        self._plan_is_due = True
        if row.machine is not None:
            self._changed_machines[row.machine.name] = row.machine
        if self._is_settled(row):
            self._unsettled.pop(row.id, None)
        else:
            self._unsettled[row.id] = row

    def _note(self, row: Row) -> None:
        self._changed[row.id] = row
        self.changed_seats[row.id] = row

    def touch_machine(self, machine: Machine) -> None:
        """The same of a node, and of all that is on it."""
        self._changed_machines[machine.name] = machine
        self._plan_is_due = True
        for row in list(machine.rows.values()):
            self.touch(row)

    def wish_changed(self) -> None:
        """What is wanted of the whole deployment is something else by now."""
        self._plan_is_due = True

    def _is_settled(self, row: Row) -> bool:
        if row.status == states.STOPPED:
            return True
        runs = row.status == states.READY and row.wanted == "run" and row.told == "run"
        steady = row.born_seconds is not None and self.now_seconds >= max(
            row.crashes_until, row.opens_seconds
        )
        there = row.machine is not None and row.machine.alive and self.now_seconds >= row.machine.late_until
        return runs and steady and there and row.leaving_since is None

    def _end(self, row: Row) -> None:
        self._move_sessions(row, row.sessions)
        del self.rows[row.id]
        self.ended[row.id] = row
        if row.machine is not None:
            row.machine.rows.pop(row.id)
        self._touch_replaced(row)

    def _touch_replaced(self, row: Row) -> None:
        """What is replaced does not count for the spread."""
        old = self.rows.get(row.replaces)
        if old is not None and old.machine is not None:
            self._changed_machines[old.machine.name] = old.machine
