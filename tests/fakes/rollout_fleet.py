"""A simulated deployment that is planned by the product itself (`plan_deployment`), and its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import (
    SERVING,
    STANDBY,
    DeploymentSnapshot,
    HealingFacts,
    ReplicaFacts,
    RollTarget,
)
from exaserve_ops.serving.domain.healing import FAILED, HELD, SLOW
from exaserve_ops.serving.domain.lifecycle import REPLICA
from exaserve_ops.serving.domain.placement import AcceleratorRoom, NodeRoom
from exaserve_ops.serving.domain.reconcile import plan_deployment
from exaserve_ops.serving.domain.steps import (
    Create,
    Hold,
    LetGo,
    Place,
    Promote,
    Replace,
    StandDown,
    Step,
    Wait,
)
from tests.fakes.rollout_nodes import RolloutNodes
from tests.fakes.rollout_records import (
    DEAD_SECONDS,
    DRAIN_SECONDS,
    LOAD_SECONDS,
    OLD,
    POLICY,
    REQUEST,
    SUSPECT_SECONDS,
    WANTED_AFTER,
    Machine,
    Overtaken,
    Row,
    at,
)

_PLANS_AT_ONCE = 4


@dataclass
class RolloutFleet(RolloutNodes):
    """Everything but the rollout itself."""

    def __post_init__(self) -> None:
        self.by_name = {machine.name: machine for machine in self.machines}
        for index in range(self.wanted + self.standbys):
            role = SERVING if index < self.wanted else STANDBY
            row = self.make(OLD, role=role)
            row.machine = self.machines[index % len(self.machines)]
            row.machine.rows[row.id] = row
            row.machine.weights[OLD] = 0
            row.status, row.told, row.born_seconds = states.READY, "run", -LOAD_SECONDS
            row.sessions = self.chance.choice((0, 0, 1, 2, 3)) if role == SERVING else 0
            self.touch(row)
        self.sessions = sum(row.sessions for row in self.rows.values())

    # -- the deployment's own plan ---------------------------------------------------------------------
    def reconcile(self) -> None:
        """Plan and carry out, as the leading controller does after each change."""
        for _ in range(_PLANS_AT_ONCE):
            if not self._plan_is_due:
                return
            steps = plan_deployment(self.snapshot(), now=self.now)
            self._plan_is_due = False
            for step in steps:
                try:
                    self.take(step)
                except (Overtaken, IllegalTransitionError):
                    self._plan_is_due = True
            if not any(isinstance(step, Create) for step in steps):
                return

    def snapshot(self) -> DeploymentSnapshot:
        """What the plan is made from; made anew only where something changed."""
        self._refresh()
        since = self.now_seconds - POLICY.window.total_seconds()
        failures = [one for one in self._failures if one[0] >= since]
        names = sorted({machine.name for _, machine, _ in failures})
        return DeploymentSnapshot(
            id="d",
            name="d",
            deleting=False,
            replicas_wanted=self.wanted,
            request=REQUEST,
            replicas=tuple(self._facts.values()),
            nodes=tuple(machine.room for machine in self.machines if machine.room is not None),
            standbys_wanted=self.standbys,
            healing=HealingFacts(
                frozen=self.frozen,
                failed_nodes=tuple((name, name) for name in names),
                recent_replacements=sum(second >= since for second in self._limited),
                failed_releases=frozenset(release for _, _, release in failures),
            ),
            release=self.release,
        )

    def _refresh(self) -> None:
        for machine in self._changed_machines.values():
            machine.room = self._room(machine)
            self._changed |= machine.rows
        for row in self._changed.values():
            if row.status == states.STOPPED:
                self._facts.pop(row.id, None)
            else:
                self._facts[row.id] = _facts_of(row, self.now_seconds)
        self._changed_machines, self._changed = {}, {}

    def _room(self, machine: Machine) -> NodeRoom:
        refusal = "dead" if machine.is_lost else "draining" if machine.draining else ""
        stays: Counter[str] = Counter()
        if not refusal:
            kept = [r for r in machine.rows.values() if r.wanted == "run" and r.status != states.FAILED]
            stays = Counter(row.role for row in kept if not self.successors_of(row))
        device = AcceleratorRoom(f"a-{machine.name}", "cuda", machine.slots << 30, len(machine.rows) << 30)
        return NodeRoom(
            node_id=machine.name,
            name=machine.name,
            accepts=not refusal,
            refusal=refusal,
            engines=frozenset({"torch"}),
            rack=machine.rack,
            accelerators=(device,),
            same_deployment=stays[SERVING],
            replicas=len(machine.rows),
            same_standby=stays[STANDBY],
            draining=machine.draining,
            suspect=SUSPECT_SECONDS <= machine.silent_seconds < DEAD_SECONDS,
        )

    # -- the record ------------------------------------------------------------------------------------
    def take(self, step: Step) -> None:
        """Carry out one step, as the product's services do. Raises where it was overtaken."""
        self.steps[type(step).__name__] += 1
        match step:
            case Create(count=count, role=role):
                for _ in range(count):
                    self.make(self.release, role=role)
            case Place(replica_id=key, placement=to):
                self._put(self._live(key), self.by_name[to.node_id])
            case Replace(replica_id=key, placement=to, cause=cause):
                self._replace(self._live(key), self.by_name[to.node_id], cause)
            case Promote() | StandDown():
                self._change_role(step)
            case LetGo(replica_id=key, event=event, successor=successor):
                self.let_go(self._live(key), event, gives_way=bool(successor))
            case Wait() | Hold():
                self._note_why(step)

    def _note_why(self, step: Wait | Hold) -> None:
        row = self._live(step.replica_id)
        if isinstance(step, Wait):
            row.reason = step.why
        else:
            row.healing_note = step.why
        self.touch(row)

    def make(self, release: str, *, role: str = SERVING, replaces: str = "", made_for: str = "") -> Row:
        """A new replica, that has no place yet."""
        self._made += 1
        row = Row(f"r{self._made:06}", release, role, self.now_seconds, replaces, made_for)
        self.rows[row.id] = row
        if replaces:
            self._replacing.setdefault(replaces, []).append(row.id)
        self._touch_replaced(row)
        self.touch(row)
        return row

    def let_go(self, row: Row, event: str, *, gives_way: bool = False) -> None:
        """Drain, stop or cancel it; one that gives way has its successor made in the same moment."""
        if gives_way and (not row.rolls_to or row.wanted != "run"):
            raise Overtaken(f"{row.id} makes way for nobody now")
        served = row.answers
        after = REPLICA.next(row.status, event)
        row.wanted, row.healing_note = WANTED_AFTER[event], ""
        row.drain_until = self.now_seconds + DRAIN_SECONDS
        row.status, row.status_seconds = after, self.now_seconds
        if gives_way:
            self.make(row.rolls_to, role=row.role, replaces=row.id, made_for="rollout")
            if served:
                self.given_way.append(row)
        self._touch_replaced(row)
        self.touch(row)

    def successors_of(self, row: Row) -> list[Row]:
        """Those that take its place and are meant to run on: one at most, if all is well."""
        found = (self.rows.get(key) for key in self._replacing.get(row.id, ()))
        return [one for one in found if one is not None and one.wanted == "run"]

    def roll(self, rows: Iterable[Row], release: str, *, in_place: bool) -> None:
        """Have replicas make way for those of a release, or with none stay after all."""
        for row in rows:
            row.rolls_to, row.in_place = release, in_place and bool(release)
            self.touch(row)

    def ask_to_leave(self, rows: Iterable[Row], since: datetime | None, targets: tuple[str, ...]) -> None:
        """Have sessions leave replicas, or with no moment given stay after all."""
        for row in rows:
            row.leaving_since = (row.leaving_since or since) if since is not None else None
            row.targets = targets
            self.touch(row)

    def drain(self, rows: Iterable[Row]) -> None:
        """Let those go that are ready."""
        for row in rows:
            if row.status == states.READY:
                self.let_go(row, "drain")

    def _live(self, key: str) -> Row:
        if key not in self.rows:
            raise Overtaken(f"{key} has ended")
        return self.rows[key]

    def _put(self, row: Row, machine: Machine) -> None:
        self.move(row, "place")
        row.machine = machine
        machine.rows[row.id] = row
        self.touch(row)

    def _replace(self, old: Row, machine: Machine, cause: str) -> None:
        if old.wanted != "run" or (cause == "rollout" and not old.rolls_to):
            raise Overtaken(f"{old.id} makes way for nobody now")
        if self.successors_of(old):
            return
        made = self.make(old.rolls_to or old.release, role=old.role, replaces=old.id, made_for=cause)
        if cause in {FAILED, HELD, SLOW}:
            self._limited.append(self.now_seconds)
        self._put(made, machine)

    def _change_role(self, step: Promote | StandDown) -> None:
        if isinstance(step, StandDown):
            self._give_role(self._live(step.replica_id), STANDBY)
            return
        standby = self._live(step.replica_id)
        if step.instead_of:
            absent = self._live(step.instead_of)
            ready = standby.role == STANDBY and standby.status == states.READY and standby.wanted == "run"
            if not ready or absent.role != SERVING or absent.status == states.READY:
                raise Overtaken(f"{absent.id} serves, or {standby.id} is no ready standby any more")
            self._give_role(absent, STANDBY)
        self._give_role(standby, SERVING)

    def _give_role(self, row: Row, role: str) -> None:
        if row.role == role or row.wanted != "run":
            raise Overtaken(f"{row.id} is let go, or has its role already")
        row.role = role
        self.touch(row)


def _facts_of(row: Row, now_seconds: int) -> ReplicaFacts:
    return ReplicaFacts(
        id=row.id,
        name=row.id,
        status=row.status,
        wanted=row.wanted,
        reason=row.reason,
        active_sessions=row.sessions,
        created_at=at(row.created_seconds),
        role=row.role,
        node=row.machine.room if row.machine is not None else None,
        replaces=row.replaces,
        healing_note=row.healing_note,
        is_closed=row.status == states.READY and now_seconds < row.opens_seconds,
        release=row.release,
        roll=RollTarget(row.rolls_to, row.rolls_to, in_place=row.in_place)
        if row.rolls_to not in {"", row.release}
        else None,
    )
