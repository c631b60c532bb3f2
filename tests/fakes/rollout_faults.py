"""What goes wrong during a simulated rollout, drawn from a seed: of nodes, of controllers, by people."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.rollouts.domain import lifecycle as states
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT
from exaserve_ops.serving.domain.lifecycle import READY
from tests.fakes.rollout_records import NEW, OLD, Machine, Row
from tests.fakes.rollout_world import Look, RolloutWorld

LEASE_SECONDS = 10
"""After a leader's death nobody looks for so long."""
CALM_SECONDS = 6 * 3600
"""From then on nothing new goes wrong."""

NO_TRAFFIC = "nobody asks it anything"
FULL_DISK = "a disk stays full"
QUORUM_LOST = "more than half of the domains stay away"


@dataclass
class Trouble:
    """Draws what happens next; `lacking` is what never mends in this one."""

    world: RolloutWorld
    chance: random.Random
    lacking: str = ""
    done: Counter[str] = field(default_factory=Counter)
    """How often each kind struck."""
    by_person: set[str] = field(default_factory=set)
    is_over: bool = False
    """A person leaves it halted."""
    _later: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    _struck: set[str] = field(default_factory=set)
    """Nodes that something ails now."""
    _rack_is_lost: bool = False
    _resumed: int = 0
    _asked: bool = False
    """Whether a person was told that it halted or waits."""
    _stalled: list[tuple[int, Look]] = field(default_factory=list)
    """Looks of leaders that were held up, and when they go on."""
    _nobody_leads_until: int = 0

    def __post_init__(self) -> None:
        self._most_wanted = self.world.fleet.wanted
        self._kinds: list[tuple[float, Callable[[], None]]] = [
            (0.03, self._node_lost),
            (0.01, self._node_flaps),
            (0.004, self._rack_lost),
            (0.01, self._node_drains),
            (0.02, self._commands_lost),
            (0.02, self._reports_late),
            (0.02, self._agent_restarts),
            (0.01, self._node_slow),
            (0.02, self._old_one_crashes),
            (0.006, self._scaled),
            (0.015, self._disk_full),
            (0.01, self._weights_corrupt),
            (0.003, self._traffic_stops),
            (0.003, self._healing_frozen),
            (0.003, self._person_pauses),
            (0.0006, self._person_turns_back),
        ]
        if self.lacking:
            self._take_away()

    @property
    def now(self) -> int:
        return self.world.fleet.now_seconds

    # -- a moment --------------------------------------------------------------------------------------
    def strike(self) -> None:
        """Mend what is due, and perhaps break something."""
        due = [pair for pair in self._later if pair[0] <= self.now]
        self._later = [pair for pair in self._later if pair[0] > self.now]
        for _, mend in due:
            mend()
        self._watch()
        if self.now < CALM_SECONDS:
            for likelihood, kind in self._kinds:
                if self.chance.random() < likelihood:
                    kind()

    def control(self) -> bool:
        """Whoever leads looks and acts; returns whether there was anything to do but wait."""
        self._wake_stalled()
        if self.now < self._nobody_leads_until:
            return True
        look = self.world.look()
        draw = self.chance.random() if self.now < CALM_SECONDS else 1.0
        if draw < 0.03:
            self._count("controller died between two actions")
            self.world.carry_out(look, most=self.chance.randint(0, 3))
            self._nobody_leads_until = self.now + LEASE_SECONDS
            self.world.epoch += 1
        elif draw < 0.05:
            self._count("two leaders at once")
            self._stalled.append((self.now + self.chance.choice((5, 20, 60, 200)), look))
            self.world.epoch += 1
            self.world.carry_out(self.world.look())
        elif draw < 0.07:
            self._count("actions came late")
            self._stalled.append((self.now + 1, look))
        elif draw < 0.08:
            self._count("person acted between two actions")
            first = self.chance.randint(0, 1)
            self.world.carry_out(look, most=first)
            self._person_pauses()
            self.world.carry_out(replace(look, actions=look.actions[first:]))
        else:
            self.world.carry_out(look, twice=draw < 0.13)
        return any(type(action).__name__ not in {"Wait", "NoteGates"} for action in look.actions)

    def _wake_stalled(self) -> None:
        due = [pair for pair in self._stalled if pair[0] <= self.now]
        self._stalled = [pair for pair in self._stalled if pair[0] > self.now]
        for _, look in due:
            self.world.carry_out(look)

    # -- people ----------------------------------------------------------------------------------------
    def _watch(self) -> None:
        """Somebody sees that it stands still, and decides after a while."""
        stands = self.world.status in {states.PAUSED, states.HALTED}
        if stands and not self._asked:
            self._asked = True
            self._after(self.chance.choice((30, 300, 1200)), self._decide)
        if not stands:
            self._asked = False

    def _decide(self) -> None:
        self._asked = False
        if self.world.status not in {states.PAUSED, states.HALTED}:
            return
        if self.world.status == states.HALTED:
            self._resumed += 1
            if self.lacking and self._resumed > 2:
                self.is_over = True
                return
            if self.world.bad and self._resumed > 3:
                self._turn_back()
                return
        self._count("person let it go on")
        self.world.resume("it may go on")

    def _person_pauses(self) -> None:
        if ROLLOUT.allows(self.world.status, "pause"):
            self._count("person paused it")
            self.world.advance("pause", "let me look")

    def _person_turns_back(self) -> None:
        if ROLLOUT.allows(self.world.status, "roll_back"):
            self._turn_back()

    def _turn_back(self) -> None:
        self._count("person turned it back")
        self.by_person.add("roll_back")
        self.world.advance("roll_back", "not today")

    def ask_of_ended(self) -> list[str]:
        """What people may still do with one that has ended: nothing, if all is well."""
        allowed = []
        for event in ("start", "pause", "resume", "roll_back", "halt", "finish", "finish_back"):
            try:
                ROLLOUT.next(self.world.status, event)
                allowed.append(event)
            except IllegalTransitionError:
                pass
        return allowed

    # -- nodes -----------------------------------------------------------------------------------------
    def _node_lost(self) -> None:
        machine = self._whole_one()
        if machine is not None:
            self._count("node lost")
            self._take_down([machine], self.chance.choice((10, 60, 300, 1800)))

    def _node_flaps(self) -> None:
        machine = self._whole_one()
        if machine is None:
            return
        self._count("node flaps")
        self._struck.add(machine.name)
        after = 0
        for _ in range(self.chance.randint(2, 5)):
            self._after(after, lambda: self._cut(machine))
            after += self.chance.choice((3, 8, 30))
            self._after(after, lambda: self._bring_back(machine))
            after += self.chance.choice((3, 8, 60))
        self._after(after, lambda: self._struck.discard(machine.name))

    def _rack_lost(self) -> None:
        if self._rack_is_lost or self.lacking == QUORUM_LOST:
            return
        self._count("whole domain lost")
        place = self.chance.choice(self.world.fleet.machines).place
        lost = [m for m in self.world.fleet.machines if m.place == place and m.name not in self._struck]
        seconds = self.chance.choice((30, 300, 1200))
        self._rack_is_lost = True
        self._take_down(lost, seconds)
        self._after(seconds, self._rack_returns)
        if self.chance.random() < 0.5:
            self._freeze(min(seconds, 240))

    def _rack_returns(self) -> None:
        self._rack_is_lost = False

    def _take_down(self, lost: list[Machine], seconds: int) -> None:
        loses_power = self.chance.random() < 0.6
        for machine in lost:
            self._struck.add(machine.name)
            if loses_power:
                self.world.fleet.lose_power(machine)
            else:
                self._cut(machine)
            self._after(seconds, partial(self._recover, machine))

    def _recover(self, machine: Machine) -> None:
        self._bring_back(machine)
        self._struck.discard(machine.name)

    def _cut(self, machine: Machine) -> None:
        machine.alive = False
        self.world.fleet.touch_machine(machine)

    def _bring_back(self, machine: Machine) -> None:
        machine.alive = True
        self.world.fleet.touch_machine(machine)

    def _node_drains(self) -> None:
        machine = self._whole_one()
        if machine is None:
            return
        self._count("node drained")
        self._struck.add(machine.name)
        machine.draining = "maintenance"
        self.world.fleet.touch_machine(machine)

        def back() -> None:
            machine.draining = ""
            self._struck.discard(machine.name)
            self.world.fleet.touch_machine(machine)

        self._after(self.chance.choice((300, 1200)), back)

    def _commands_lost(self) -> None:
        self._count("commands lost")
        for machine in self._some(self.chance.choice((1, 4, 16))):
            machine.deaf_until = self.now + self.chance.choice((10, 40, 120))

    def _reports_late(self) -> None:
        self._count("reports late")
        for machine in self._some(self.chance.choice((1, 4, 16))):
            machine.late_until = self.now + self.chance.choice((10, 40, 120))

    def _agent_restarts(self) -> None:
        self._count("agent restarted")
        for machine in self._some(1):
            machine.late_until = machine.deaf_until = self.now + self.chance.choice((2, 15))

    def _node_slow(self) -> None:
        self._count("node slow")
        for machine in self._some(1):
            machine.is_slow = True
            self._after(1800, partial(self._speed_up, machine))

    def _speed_up(self, machine: Machine) -> None:
        machine.is_slow = False

    def _traffic_returns(self) -> None:
        self.world.has_traffic = True

    # -- replicas, weights, load -----------------------------------------------------------------------
    def _old_one_crashes(self) -> None:
        row = self._row(OLD)
        if row is not None:
            gives_up = self.chance.random() < 0.3
            self._count("old replica given up" if gives_up else "old replica crashed")
            self.world.fleet.crash(row, gives_up=gives_up)

    def _scaled(self) -> None:
        fleet = self.world.fleet
        share = max(1, fleet.wanted // 50)
        fleet.wanted = max(2, min(self._most_wanted, fleet.wanted + self.chance.choice((-share, share))))
        self._count("scaled")
        fleet.wish_changed()

    def _disk_full(self) -> None:
        self._count("disk full")
        for machine in self._some(self.chance.choice((1, 1, 4))):
            self._break_disk(machine, "no room on its disk: 1 GiB is free, 140 GiB are needed")
            self.world.fleet.fill_disk(machine)

    def _weights_corrupt(self) -> None:
        self._count("weights arrived corrupt")
        for machine in self._some(1):
            if machine.weights.get(NEW, 0) > self.now:
                del machine.weights[NEW]
            self._break_disk(machine, "piece 17 is not what its manifest says, and is fetched again")

    def _break_disk(self, machine: Machine, why: str) -> None:
        machine.disk = why
        if self.lacking != FULL_DISK or machine.name not in self._struck:
            self._after(self.chance.choice((60, 300, 900)), partial(setattr, machine, "disk", ""))

    def _traffic_stops(self) -> None:
        if self.lacking == NO_TRAFFIC or not self.world.has_traffic:
            return
        self._count("nobody asked anything")
        self.world.has_traffic = False
        self._after(self.chance.choice((60, 600, 1500)), self._traffic_returns)

    def _healing_frozen(self) -> None:
        self._count("healing frozen")
        self._freeze(self.chance.choice((60, 300)))

    def _freeze(self, seconds: int) -> None:
        self.world.fleet.frozen = "many nodes went away at once"
        self.world.fleet.wish_changed()

        def over() -> None:
            self.world.fleet.frozen = ""
            self.world.fleet.wish_changed()

        self._after(seconds, over)

    # -- what never mends ------------------------------------------------------------------------------
    def _take_away(self) -> None:
        self._count(f"for good: {self.lacking}")
        machines = self.world.fleet.machines
        if self.lacking == NO_TRAFFIC:
            self.world.has_traffic = False
        elif self.lacking == FULL_DISK:
            for machine in machines[:: max(1, len(machines) // 4)]:
                self._struck.add(machine.name)
                machine.disk = "no room on its disk: 1 GiB is free, 140 GiB are needed"
        else:
            places = sorted({machine.place for machine in machines})
            gone = set(places[: len(places) * 5 // 8])
            for machine in (m for m in machines if m.place in gone):
                self._struck.add(machine.name)
                self._after(300, partial(self.world.fleet.lose_power, machine))

    # -- who -------------------------------------------------------------------------------------------
    def _after(self, seconds: int, then: Callable[[], None]) -> None:
        self._later.append((self.now + seconds, then))

    def _count(self, kind: str) -> None:
        self.done[kind] += 1

    def _whole_one(self) -> Machine | None:
        """A node that nothing ails; none while one in thirty-two is struck by itself."""
        machines = self.world.fleet.machines
        whole = [machine for machine in self._some(3) if machine.alive and machine.name not in self._struck]
        struck = 0 if self._rack_is_lost or self.lacking else len(self._struck)
        return whole[0] if whole and struck < max(1, len(machines) // 32) else None

    def _some(self, count: int) -> list[Machine]:
        return [self.chance.choice(self.world.fleet.machines) for _ in range(count)]

    def _row(self, release: str) -> Row | None:
        for machine in self._some(4):
            for row in machine.rows.values():
                if row.release == release and row.status == READY and row.wanted == "run" and machine.alive:
                    return row
        return None
