"""A fleet with a virtual clock that carries out the plans of one deployment, and breaks as it is told to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import (
    SERVING,
    STANDBY,
    DeploymentSnapshot,
    HealingFacts,
    HealingPolicy,
    ReplicaFacts,
)
from exaserve_ops.serving.domain.healing import FAILED, HELD, SLOW
from exaserve_ops.serving.domain.lifecycle import REPLICA
from exaserve_ops.serving.domain.placement import AcceleratorRoom, NodeRoom, PlacementRequest
from exaserve_ops.serving.domain.reconcile import plan_deployment
from exaserve_ops.serving.domain.steps import (
    Create,
    FinishDeletion,
    Hold,
    LetGo,
    Place,
    Promote,
    Quarantine,
    Replace,
    StandDown,
    Step,
    Wait,
)

START = datetime(2026, 1, 1, tzinfo=UTC)
WANTED_AFTER = {"drain": "drain", "stop": "stop", "cancel": "stop"}
LOAD_SECONDS = 4
POLICY = HealingPolicy()


@dataclass
class Box:
    """One machine."""

    name: str
    rack: str
    slots: int
    alive: bool = True
    silent_seconds: int = 0
    draining: bool = False
    drain_is_over: bool = False
    poisoned: bool = False
    """Whatever starts here is given up by its agent."""
    quarantine: str = ""
    processes: dict[str, int] = field(default_factory=dict)
    """Age of each replica's process in seconds."""


@dataclass
class HealingWorld:
    """Ticks in seconds: agents act, the detector sees, the planner plans, the record takes it over."""

    wanted: int
    standbys: int = 0
    boxes: list[Box] = field(default_factory=list)
    pinned: tuple[str, ...] = ()
    now: datetime = START
    frozen: str = ""
    drain_slow: bool = False
    deleting: bool = False
    replicas: dict[str, ReplicaFacts] = field(default_factory=dict)
    box_of: dict[str, Box] = field(default_factory=dict)
    failed_at: dict[str, datetime] = field(default_factory=dict)
    replaced_at: list[datetime] = field(default_factory=list)
    log: list[Step] = field(default_factory=list)

    # -- what a test does to it --------------------------------------------------------------------
    def box(self, name: str) -> Box:
        return next(box for box in self.boxes if box.name == name)

    def kill(self, name: str) -> None:
        self.box(name).alive = False
        self.box(name).processes.clear()

    def cut_off(self, name: str) -> None:
        self.box(name).alive = False

    def bring_back(self, name: str) -> None:
        self.box(name).alive = True

    def crash(self, replica_id: str) -> None:
        box = self.box_of.get(replica_id)
        if box is not None and box.processes.pop(replica_id, None) is not None and box.alive:
            self.see(replica_id, "seen_backing_off")

    def mend(self) -> None:
        self.frozen = ""
        for box in self.boxes:
            box.alive, box.draining, box.drain_is_over, box.poisoned = True, False, False, False

    # -- a second of its life -----------------------------------------------------------------------
    def tick(self, seconds: int = 1) -> tuple[Step, ...]:
        self.now += timedelta(seconds=seconds)
        for box in self.boxes:
            self._agent(box, seconds)
            self._detect(box, seconds)
        return self.reconcile()

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.tick()

    def settle(self, seconds: int) -> None:
        """Let time pass, in coarse steps, until nothing changes any more."""
        for _ in range(0, seconds, 5):
            before = dict(self.replicas)
            if self.tick(5) == () and before == self.replicas and self._at_rest():
                return
        raise AssertionError(f"no rest after {seconds} s: {self.picture()}")

    def settle_without(self, names: tuple[str, ...], seconds: int = 60) -> None:
        """Let time pass while these boxes stay away."""
        assert not any(self.box(name).alive for name in names)
        self.run(seconds)

    def reconcile(self) -> tuple[Step, ...]:
        steps = plan_deployment(self.snapshot(), now=self.now)
        for step in steps:
            assert not hasattr(step, "why") or step.why or isinstance(step, Hold), step
            self._take(step)
        self.log += steps
        self.check()
        return steps

    # -- what must hold after each plan -------------------------------------------------------------
    def check(self) -> None:
        kept = self.kept()
        replaced = Counter(r.replaces for r in kept if r.replaces)
        assert max(replaced.values(), default=0) <= 1, "two replacements for one"
        running = [r for r in kept if r.status not in {states.UNREACHABLE, states.FAILED}]
        bound = self.wanted + self.standbys + POLICY.surge(self.wanted)
        assert len(running) <= bound, f"{len(running)} run, {bound} may: {self.picture()}"
        if self.pinned:
            assert {self.box_of[r.id].name for r in kept if r.id in self.box_of} <= set(self.pinned)

    # -- what it looks like -------------------------------------------------------------------------
    def kept(self) -> list[ReplicaFacts]:
        return [r for r in self.replicas.values() if r.is_kept]

    def routed(self) -> list[ReplicaFacts]:
        return [
            r
            for r in self.kept()
            if r.role == SERVING and r.status == states.READY and self.box_of[r.id].alive
        ]

    def ready(self, role: str) -> list[ReplicaFacts]:
        return [r for r in self.kept() if r.role == role and r.status == states.READY]

    def on(self, name: str) -> list[ReplicaFacts]:
        return [r for r in self.kept() if r.id in self.box_of and self.box_of[r.id].name == name]

    def picture(self) -> str:
        rows = [
            f"{r.id} {r.role} {r.status} wanted {r.wanted} on {getattr(self.box_of.get(r.id), 'name', '-')}"
            f" for {r.replaces or '-'}: {r.healing_note or r.reason}"
            for r in self.replicas.values()
            if r.status != states.STOPPED
        ]
        return "\n".join(["", *rows, str(plan_deployment(self.snapshot(), now=self.now))])

    def snapshot(self) -> DeploymentSnapshot:
        rooms = {box.name: self._room(box) for box in self.boxes}
        since = self.now - POLICY.window
        failed = {self.box_of[key].name for key, at in self.failed_at.items() if at >= since}
        return DeploymentSnapshot(
            id="d",
            name="d",
            deleting=self.deleting,
            replicas_wanted=self.wanted,
            request=PlacementRequest("torch", 1, nodes=self.pinned),
            replicas=tuple(
                replace(r, node=rooms[self.box_of[r.id].name] if r.id in self.box_of else None)
                for r in self.replicas.values()
                if r.status != states.STOPPED
            ),
            nodes=tuple(rooms.values()),
            standbys_wanted=self.standbys,
            healing=HealingFacts(
                frozen=self.frozen,
                drain_slow=self.drain_slow,
                failed_nodes=tuple(sorted((name, name) for name in failed)),
                recent_replacements=sum(at >= since for at in self.replaced_at),
            ),
        )

    def _room(self, box: Box) -> NodeRoom:
        holding = [
            r for r in self.replicas.values() if self.box_of.get(r.id) is box and r.status != states.STOPPED
        ]
        counted = [
            r
            for r in holding
            if r.is_kept and r.status not in {states.UNREACHABLE, states.FAILED} and not box.draining
        ]
        refusal = "dead" if box.silent_seconds >= 3 else "draining" if box.draining else ""
        device = AcceleratorRoom(f"a-{box.name}", "cuda", box.slots, len(holding), box.quarantine)
        return NodeRoom(
            node_id=box.name,
            name=box.name,
            accepts=not refusal,
            refusal=refusal,
            engines=frozenset({"torch"}),
            rack=box.rack,
            accelerators=(device,),
            same_deployment=sum(r.role == SERVING for r in counted),
            replicas=len(holding),
            same_standby=sum(r.role == STANDBY for r in counted),
            draining="maintenance" if box.draining else "",
            drain_is_over=box.drain_is_over,
        )

    # -- agents and the detector --------------------------------------------------------------------
    def _agent(self, box: Box, seconds: int) -> None:
        for replica_id in list(box.processes):
            box.processes[replica_id] += seconds
        if not box.alive:
            return
        for replica in [r for r in self.replicas.values() if self.box_of.get(r.id) is box]:
            if replica.status == states.STOPPED:
                continue
            if replica.wanted == "run":
                self._keep_running(box, replica)
            else:
                box.processes.pop(replica.id, None)
                self.see(replica.id, "seen_stopped")

    def _keep_running(self, box: Box, replica: ReplicaFacts) -> None:
        if replica.status == states.FAILED:
            return
        if box.poisoned and box.processes.get(replica.id, 0) < LOAD_SECONDS:
            self.failed_at[replica.id] = self.now
            self.see(replica.id, "seen_failed")
            return
        age = box.processes.setdefault(replica.id, 0)
        self.see(replica.id, "seen_ready" if age >= LOAD_SECONDS else "seen_loading")

    def _detect(self, box: Box, seconds: int) -> None:
        box.silent_seconds = 0 if box.alive else box.silent_seconds + seconds
        if box.silent_seconds < 3:
            return
        for replica in list(self.replicas.values()):
            if self.box_of.get(replica.id) is box:
                self.see(replica.id, "node_lost")

    def see(self, replica_id: str, event: str) -> None:
        facts = self.replicas[replica_id]
        if REPLICA.allows(facts.status, event):
            self.change(replica_id, status=REPLICA.next(facts.status, event))

    def change(self, replica_id: str, **changes: object) -> None:
        self.replicas[replica_id] = replace(self.replicas[replica_id], **changes)  # type: ignore[arg-type]  # a test's

    # -- the record ---------------------------------------------------------------------------------
    def _take(self, step: Step) -> None:  # noqa: C901, PLR0912 - one case a step
        match step:
            case Create(count=count, role=role):
                for _ in range(count):
                    self._make(role=role)
            case Place(replica_id=replica_id, placement=to):
                self._put(replica_id, to.node_id)
            case Replace(replica_id=replica_id, placement=to, role=role, cause=cause):
                self._put(self._make(role=role, replaces=replica_id), to.node_id)
                if cause in {FAILED, HELD, SLOW}:
                    self.replaced_at.append(self.now)
            case Promote(replica_id=standby, instead_of=absent):
                assert self.replicas[standby].role == STANDBY
                self.change(standby, role=SERVING)
                if absent:
                    assert self.replicas[standby].status == states.READY
                    assert self.replicas[absent].role == SERVING
                    assert self.replicas[absent].status != states.READY
                    self.change(absent, role=STANDBY)
            case StandDown(replica_id=fallen):
                assert self.replicas[fallen].role == SERVING
                self.change(fallen, role=STANDBY)
            case Wait(replica_id=replica_id, why=why):
                self.change(replica_id, reason=why)
            case Hold(replica_id=replica_id, why=why):
                self.change(replica_id, healing_note=why)
            case LetGo(replica_id=replica_id, event=event):
                self.change(replica_id, wanted=WANTED_AFTER[event])
                self.see(replica_id, event)
            case Quarantine(accelerator_uuids=uuids, why=why):
                for box in self.boxes:
                    box.quarantine = why if f"a-{box.name}" in uuids else box.quarantine
            case FinishDeletion():
                assert not self.kept()

    def _make(self, **changes: str) -> str:
        number = len(self.replicas) + 1
        born = START + timedelta(seconds=number)
        replica_id = f"r{number:04}"
        self.replicas[replica_id] = ReplicaFacts(
            replica_id,
            replica_id,
            states.PENDING,
            "run",
            "",
            0,
            born,
            **changes,  # type: ignore[arg-type]  # text
        )
        return replica_id

    def _put(self, replica_id: str, name: str) -> None:
        assert replica_id not in self.box_of, "placed twice"
        box = self.box(name)
        assert box.silent_seconds < 3, f"placed on {name}, which is dead"
        assert not box.draining, f"placed on {name}, which drains"
        assert not box.quarantine, f"placed on {name}, which is quarantined"
        self.box_of[replica_id] = box
        self.see(replica_id, "place")
        held = [
            r for r in self.replicas.values() if self.box_of.get(r.id) is box and r.status != states.STOPPED
        ]
        assert len(held) <= box.slots, f"{name} is overfull"

    def _at_rest(self) -> bool:
        done = {states.READY, states.STOPPED}
        return all(r.status in done for r in self.replicas.values())


def fleet(nodes: int = 6, *, racks: int = 3, slots: int = 4) -> list[Box]:
    return [Box(f"n{i}", f"r{i % racks}" if racks else "", slots) for i in range(nodes)]
