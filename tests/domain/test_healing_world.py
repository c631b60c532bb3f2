"""Healing in a simulated fleet: what must never happen, and where it must end once faults stop."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import SERVING, STANDBY
from exaserve_ops.serving.domain.reconcile import make_plan, plan_takeover
from exaserve_ops.serving.domain.steps import Create, LetGo, Promote, Quarantine, Replace
from tests.fakes.healing_world import Box, HealingWorld, fleet


def settled(wanted: int, standbys: int = 0, **changes: object) -> HealingWorld:
    boxes = changes.pop("boxes", None) or fleet()
    world = HealingWorld(wanted, standbys, boxes=boxes, **changes)  # type: ignore[arg-type]  # a test's
    world.settle(120)
    assert len(world.ready(SERVING)) == wanted
    assert len(world.ready(STANDBY)) == standbys
    return world


def steps_of(world: HealingWorld, kind: type) -> list[object]:
    return [step for step in world.log if isinstance(step, kind)]


# -- a node is gone ------------------------------------------------------------------------------------
def test_replicas_of_a_dead_node_are_replaced_once_and_told_to_stop_when_replaced() -> None:
    world = settled(6)
    lost = [r.id for r in world.on("n0")]
    world.kill("n0")
    world.run(20)
    assert len(world.ready(SERVING)) == 6
    assert len(steps_of(world, Replace)) == len(lost)
    assert {world.replicas[key].wanted for key in lost} == {"stop"}
    assert {world.replicas[key].status for key in lost} == {states.STOPPING}, "never stopped until it is seen"
    world.bring_back("n0")
    world.settle(60)
    assert {world.replicas[key].status for key in lost} == {states.STOPPED}


def test_node_that_comes_back_before_its_replacements_are_ready_keeps_what_serves() -> None:
    world = settled(6)
    lost = [r.id for r in world.on("n0")]
    world.cut_off("n0")
    world.run(4)
    assert steps_of(world, Replace)
    world.bring_back("n0")
    world.run(2)
    world.settle(60)
    assert all(world.replicas[key].status == states.READY for key in lost)
    assert len(world.kept()) == 6


def test_node_that_comes_back_late_stops_what_was_replaced() -> None:
    world = settled(6)
    lost = [r.id for r in world.on("n0")]
    world.cut_off("n0")
    world.run(15)
    world.bring_back("n0")
    world.settle(60)
    assert all(world.replicas[key].status == states.STOPPED for key in lost)
    assert len(world.ready(SERVING)) == 6


def test_nothing_is_healed_while_healing_is_frozen_and_everything_after() -> None:
    world = settled(6, 1)
    made, world.frozen = len(world.replicas), "half the fleet fell silent at once"
    for name in ("n0", "n1", "n2"):
        world.cut_off(name)
    world.run(30)
    assert len(world.replicas) == made
    assert not steps_of(world, Promote)
    notes = {r.healing_note for r in world.kept() if r.status == states.UNREACHABLE}
    assert notes == {"healing is frozen: half the fleet fell silent at once"}
    world.frozen = ""
    world.settle_without(("n0", "n1", "n2"))
    assert len(world.routed()) == 6
    assert {r.healing_note for r in world.kept()} == {""}


def test_pinned_replica_waits_for_its_node_by_name_and_starts_nowhere_else() -> None:
    world = settled(2, pinned=("n0",))
    world.kill("n0")
    world.run(30)
    assert all(r.status == states.UNREACHABLE for r in world.kept())
    assert all("n0: dead" in r.healing_note for r in world.kept())
    assert len(world.replicas) == 2
    world.bring_back("n0")
    world.settle(60)
    assert len(world.ready(SERVING)) == 2


def test_full_fleet_replaces_as_soon_as_there_is_room() -> None:
    world = settled(4, boxes=fleet(2, racks=0, slots=2))
    world.kill("n0")
    world.run(20)
    assert len(world.routed()) == 2
    assert all("no room elsewhere" in r.healing_note for r in world.kept() if r.status == states.UNREACHABLE)
    world.boxes.append(Box("n9", "", 2))
    world.run(20)
    assert len(world.routed()) == 4


# -- a replica fails for good ----------------------------------------------------------------------------
def test_replica_that_failed_for_good_is_replaced_on_another_node() -> None:
    world = settled(6)
    world.box("n0").poisoned = True
    [victim, *_] = world.on("n0")
    world.crash(victim.id)
    world.run(20)
    [step] = steps_of(world, Replace)
    assert (step.replica_id, step.cause) == (victim.id, "failed")  # type: ignore[attr-defined]  # a Replace
    assert step.placement.node_id != "n0"  # type: ignore[attr-defined]  # a Replace
    assert world.replicas[victim.id].status == states.STOPPED
    assert len(world.ready(SERVING)) == 6


def test_replicas_that_fail_everywhere_are_given_up_with_the_nodes_named() -> None:
    world = settled(2)
    for box in world.boxes:
        box.poisoned = True
    [victim, _] = world.kept()
    world.crash(victim.id)
    world.run(120)
    assert len(steps_of(world, Replace)) == 2, "three nodes have seen it fail by then"
    note = world.replicas[victim.id].healing_note
    assert note.startswith("replicas failed on n")
    assert "change the deployment" in note
    assert len(world.ready(SERVING)) == 1


def test_replacements_of_one_window_are_bounded() -> None:
    world = settled(20, boxes=fleet(12, racks=3, slots=8))
    world.boxes[0].poisoned = world.boxes[1].poisoned = True
    for replica in world.on("n0") + world.on("n1"):
        world.crash(replica.id)
    world.replaced_at += [world.now] * 19
    world.run(30)
    assert len(steps_of(world, Replace)) == 1
    held = [r for r in world.kept() if r.status == states.FAILED]
    assert held
    assert all("replacements lately are enough" in r.healing_note for r in held)
    world.now += timedelta(minutes=11)
    world.run(30)
    assert len(world.ready(SERVING)) == 20


def test_crash_is_left_to_the_agent_that_restarts_in_place() -> None:
    world = settled(4)
    [victim, *_] = world.kept()
    world.crash(victim.id)
    world.settle(60)
    assert not steps_of(world, Replace)
    assert world.replicas[victim.id].status == states.READY


def test_failure_on_the_only_node_waits_for_a_person() -> None:
    world = settled(1, boxes=fleet(1))
    world.boxes[0].poisoned = True
    world.crash("r0001")
    world.run(30)
    assert world.replicas["r0001"].status == states.FAILED
    assert "n0: a replica of this deployment failed here" in world.replicas["r0001"].healing_note


# -- held memory --------------------------------------------------------------------------------------
def test_accelerator_that_stays_held_is_quarantined_and_the_replica_goes_elsewhere() -> None:
    world = settled(2)
    [replica, _] = world.kept()
    box = world.box_of[replica.id]
    box.processes.clear()
    world.change(
        replica.id,
        status=states.PLACED,
        held_since=world.now,
        held_by_pids=(4711,),
        accelerator_uuids=(f"a-{box.name}",),
    )
    box.alive = False  # its agent does nothing but wait
    world.now += timedelta(seconds=59)
    world.reconcile()
    assert not steps_of(world, Quarantine)
    world.now += timedelta(seconds=2)
    world.reconcile()
    [step] = steps_of(world, Quarantine)
    assert "held by pid 4711" in step.why  # type: ignore[attr-defined]  # a Quarantine
    assert "4711" in box.quarantine
    [moved] = steps_of(world, Replace)
    assert moved.cause == "held"  # type: ignore[attr-defined]  # a Replace
    world.reconcile()
    assert len(steps_of(world, Quarantine)) == 1


# -- maintenance ----------------------------------------------------------------------------------------
def test_drained_node_is_emptied_by_surge_and_nobody_is_missed() -> None:
    world = settled(8)
    world.box("n0").draining = True
    for _ in range(60):
        world.tick()
        assert len(world.routed()) >= 8
    assert world.on("n0") == []
    assert len(world.kept()) == 8


def test_drain_without_room_waits_with_a_reason_and_ends_at_its_deadline() -> None:
    world = settled(4, boxes=fleet(2, racks=0, slots=2))
    world.box("n0").draining = True
    world.run(20)
    assert len(world.routed()) == 4
    assert all("no room elsewhere" in r.healing_note for r in world.on("n0"))
    world.box("n0").drain_is_over = True
    world.run(5)
    assert [
        r for r in world.replicas.values() if world.box_of.get(r.id) is world.box("n0") and r.is_kept
    ] == []
    waiting = [r for r in world.kept() if r.status == states.PENDING]
    assert len(waiting) == 2
    assert all("draining" in r.reason for r in waiting)


# -- standbys -------------------------------------------------------------------------------------------
def test_ready_standby_serves_in_the_same_pass_in_which_a_node_is_lost() -> None:
    world = settled(6, 2)
    [lost, *_] = [r for r in world.on("n0") if r.role == SERVING]
    world.kill("n0")
    serving = len(world.routed())
    while world.replicas[lost.id].status != states.UNREACHABLE:
        world.tick()
    assert serving < len(world.routed()) == 6
    world.run(20)
    assert len(world.ready(STANDBY)) == 2, "the pool is refilled"
    assert len(world.ready(SERVING)) == 6


def test_standby_on_a_suspect_node_serves_only_if_there_is_no_other() -> None:
    world = settled(2, 2)
    snapshot = world.snapshot()
    lost = replace(next(r for r in snapshot.replicas if r.role == SERVING), status=states.UNREACHABLE)

    def promoted(*suspects: str) -> str:
        rows = [
            replace(r, node=replace(r.node, suspect=True)) if r.id in suspects and r.node else r
            for r in (lost if r.id == lost.id else r for r in snapshot.replicas)
        ]
        [step] = plan_takeover(replace(snapshot, replicas=tuple(rows)), now=world.now)
        return step.replica_id

    first = promoted()
    [other] = [r.id for r in world.ready(STANDBY) if r.id != first]
    assert promoted(first) == other
    assert promoted(first, other) == first


def test_crashed_replica_comes_back_as_the_standby() -> None:
    world = settled(4, 1)
    [victim, *_] = world.ready(SERVING)
    made = len(world.replicas)
    world.crash(victim.id)
    world.reconcile()
    assert len(world.ready(SERVING)) == 4
    assert world.replicas[victim.id].role == STANDBY
    world.settle(60)
    assert len(world.replicas) == made
    assert [r.id for r in world.ready(STANDBY)] == [victim.id]


def test_one_that_returns_after_a_standby_took_over_is_not_one_too_many() -> None:
    world = settled(6, 1)
    world.cut_off("n0")
    world.run(4)
    world.bring_back("n0")
    world.settle(60)
    assert len(world.ready(SERVING)) == 6
    assert len(world.ready(STANDBY)) == 1
    assert len(world.kept()) == 7


def test_standbys_stand_where_few_of_those_are_whom_they_stand_for() -> None:
    world = settled(
        4, 1, boxes=[Box("n0", "r0", 4), Box("n1", "r0", 4), Box("n2", "r1", 4), Box("n3", "r2", 4)]
    )
    [standby] = world.ready(STANDBY)
    serving = [world.box_of[r.id].rack for r in world.ready(SERVING)]
    rack = world.box_of[standby.id].rack
    assert serving.count(rack) == min(serving.count(r) for r in ("r0", "r1", "r2"))


def test_wishes_for_standbys_are_counted_apart() -> None:
    world = settled(4, 2)
    world.standbys = 1
    world.settle(60)
    assert (len(world.ready(SERVING)), len(world.ready(STANDBY))) == (4, 1)
    world.wanted, world.standbys = 2, 0
    world.settle(60)
    assert (len(world.ready(SERVING)), len(world.ready(STANDBY))) == (2, 0)


def test_deleting_lets_standbys_go_too() -> None:
    world = settled(3, 2)
    world.deleting = True
    world.run(4)
    assert world.kept() == []


# -- slow ones ------------------------------------------------------------------------------------------
def test_slow_replicas_are_replaced_one_at_a_time_and_only_where_that_is_the_policy() -> None:
    world = settled(8)
    slow = [r.id for r in world.kept()[:2]]
    for replica_id in slow:
        world.change(replica_id, slow_reason="TTFT 2.1 s, its peers 0.2 s")
    world.run(5)
    assert not steps_of(world, Replace)
    world.drain_slow = True
    world.tick()
    assert len(steps_of(world, Replace)) == 1
    world.run(30)
    assert len(steps_of(world, Replace)) == 2
    assert {world.replicas[key].status for key in slow} == {states.STOPPED}
    assert len(world.ready(SERVING)) == 8


# -- plans that are only shown ----------------------------------------------------------------------------
def test_plan_says_what_is_done_and_what_is_waited_for() -> None:
    world = settled(6)
    world.kill("n0")
    world.run(5)
    plan = make_plan(world.snapshot(), now=world.now)
    assert not any(isinstance(step, Create | LetGo | Replace) for step in plan.steps)
    why = {line.replica_id: line.why for line in plan.waiting}
    lost = [r.id for r in world.kept() if r.status == states.UNREACHABLE]
    assert lost
    assert all("takes its place and is loading; it goes once ready" in why[key] for key in lost)


# -- whatever happens -----------------------------------------------------------------------------------
FAULTS = st.sampled_from(
    [
        "kill",
        "cut",
        "back",
        "crash",
        "poison",
        "cure",
        "freeze",
        "thaw",
        "drain",
        "undrain",
        "scale",
        "standbys",
        "none",
    ]
)


def apply_fault(world: HealingWorld, fault: str, draw: int) -> None:  # noqa: C901, PLR0912 - a case a fault
    box = world.boxes[draw % len(world.boxes)]
    match fault:
        case "kill":
            world.kill(box.name)
        case "cut":
            world.cut_off(box.name)
        case "back":
            world.bring_back(box.name)
        case "crash" if world.kept():
            world.crash(world.kept()[draw % len(world.kept())].id)
        case "poison":
            box.poisoned = True
        case "cure":
            box.poisoned = False
        case "freeze":
            world.frozen = "guard"
        case "thaw":
            world.frozen = ""
        case "drain" | "undrain":
            box.draining = fault == "drain"
        case "scale":
            world.wanted = draw % 9
        case "standbys":
            world.standbys = draw % 3


histories = st.lists(st.tuples(FAULTS, st.integers(0, 50), st.integers(1, 6)), max_size=25)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 8), st.integers(0, 2), histories)
def test_any_history_is_safe_and_ends_at_the_wish_once_faults_stop(
    wanted: int, standbys: int, history: list[tuple[str, int, int]]
) -> None:
    world = HealingWorld(wanted, standbys, boxes=fleet(6, racks=3, slots=4))
    for fault, draw, seconds in history:
        apply_fault(world, fault, draw)
        world.run(seconds)  # each pass checks what must never happen
    world.mend()
    world.settle(3600)
    assert len(world.ready(SERVING)) == world.wanted
    assert len(world.ready(STANDBY)) == world.standbys
    assert len(world.kept()) == world.wanted + world.standbys
    assert {r.healing_note for r in world.kept()} <= {""}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), histories)
def test_pinned_replicas_never_start_elsewhere(wanted: int, history: list[tuple[str, int, int]]) -> None:
    world = HealingWorld(wanted, boxes=fleet(4, racks=2, slots=8), pinned=("n0", "n1"))
    for fault, draw, seconds in history:
        apply_fault(world, fault, draw)
        world.run(seconds)
    places = {world.box_of[r.id].name for r in world.replicas.values() if r.id in world.box_of}
    assert places <= {"n0", "n1"}


@pytest.mark.parametrize("standbys", [0, 1])
@settings(max_examples=40, deadline=None)
@given(history=histories)
def test_passes_over_the_same_moment_come_to_rest(standbys: int, history: list[tuple[str, int, int]]) -> None:
    world = HealingWorld(5, standbys, boxes=fleet())
    for fault, draw, seconds in history:
        apply_fault(world, fault, draw)
        world.run(seconds)
        passes = [world.reconcile() for _ in range(4)]
        assert passes[-1] == (), passes
