"""What people read before they scale: pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from exaserve_ops.dashboard.plans import plan_now, preview_deletion, preview_scale
from exaserve_ops.serving.domain.placement import AcceleratorRoom, NodeRoom, PlacementRequest
from exaserve_ops.serving.domain.reconcile import DeploymentSnapshot, HealingFacts, ReplicaFacts

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GIB = 1 << 30


def _node(name: str, *, gib: int = 8, refusal: str = "") -> NodeRoom:
    room = AcceleratorRoom(f"GPU-{name}", "cuda", gib * GIB, 0)
    return NodeRoom(name, name, not refusal, refusal, frozenset({"torch"}), "r1", (room,), 0, 0)


def _snapshot(*replicas: ReplicaFacts, nodes: tuple[NodeRoom, ...] = ()) -> DeploymentSnapshot:
    return DeploymentSnapshot(
        id="d",
        name="chat",
        deleting=False,
        replicas_wanted=len(replicas),
        request=PlacementRequest("torch", 4 * GIB),
        replicas=replicas,
        nodes=nodes or (_node("a"), _node("b")),
    )


def _ready(name: str, sessions: int) -> ReplicaFacts:
    return ReplicaFacts(name, name, "ready", "run", "", sessions, NOW)


def test_growing_says_where_each_new_replica_goes() -> None:
    plan = preview_scale(_snapshot(), 2, now=NOW)
    assert (plan.created, plan.placed, plan.waiting) == (2, 2, 0)
    assert {line.detail for line in plan.lines} == {"on a", "on b"}
    assert all(line.why for line in plan.lines)


def test_a_replica_that_fits_nowhere_says_why_before_anybody_agrees() -> None:
    full = (_node("a", gib=4), _node("b", refusal="cordoned: kernel update"))
    plan = preview_scale(_snapshot(nodes=full), 2, now=NOW)
    waiting = [line for line in plan.lines if line.verb == "wait"]
    assert (plan.placed, plan.waiting) == (1, 1)
    assert "kernel update" in waiting[0].why


def test_shrinking_names_who_goes_and_how_many_sessions_move() -> None:
    plan = preview_scale(_snapshot(_ready("busy", 9), _ready("calm", 2)), 1, now=NOW)
    assert [(line.verb, line.subject) for line in plan.lines] == [("drain", "calm")]
    assert (plan.let_go, plan.sessions_moved) == (1, 2)


def test_the_same_number_plans_nothing() -> None:
    assert preview_scale(_snapshot(_ready("a", 0)), 1, now=NOW).is_empty


def test_deleting_lets_everything_go() -> None:
    plan = preview_deletion(_snapshot(_ready("a", 1), _ready("b", 2)), now=NOW)
    assert (plan.let_go, plan.sessions_moved) == (2, 3)


def test_ten_thousand_new_replicas_are_counted_not_listed() -> None:
    plan = preview_scale(_snapshot(), 10_000, now=NOW)
    assert plan.created == 10_000
    assert len(plan.lines) < 1000


def test_plan_of_now_says_what_is_done_and_what_is_waited_for() -> None:
    ready, lost = (
        _ready("a-1", 0),
        replace(_ready("b-1", 0), status="unreachable", node=_node("b", refusal="dead")),
    )
    draining = replace(_ready("c-1", 2), status="draining", wanted="drain")
    snapshot = replace(
        _snapshot(ready, lost, draining, nodes=(_node("a"), _node("b", refusal="dead"))), replicas_wanted=2
    )
    plan = plan_now(snapshot, now=NOW)
    assert [(line.verb, line.subject, line.detail) for line in plan.lines] == [
        ("replace", "b-1", "by a new one on a")
    ]
    assert [(line.subject, line.why) for line in plan.waiting] == [
        ("c-1", "its sessions move, then its requests end")
    ]


def test_plan_of_now_names_the_standby_and_for_whom_it_serves() -> None:
    lost = replace(_ready("b-1", 0), status="unreachable")
    standby = replace(_ready("s-1", 0), role="standby")
    plan = plan_now(replace(_snapshot(lost, standby), replicas_wanted=1, standbys_wanted=1), now=NOW)
    assert (plan.lines[0].verb, plan.lines[0].subject, plan.lines[0].detail) == (
        "promote",
        "s-1",
        "instead of b-1",
    )


def test_frozen_healing_is_said_once_for_all() -> None:
    lost = replace(_ready("b-1", 0), status="unreachable")
    plan = plan_now(replace(_snapshot(lost), healing=HealingFacts(frozen="mass silence")), now=NOW)
    assert plan.frozen == "mass silence"
    assert "frozen" in plan.waiting[0].why


def test_standbys_are_previewed_apart() -> None:
    plan = preview_scale(_snapshot(_ready("a", 0)), 1, now=NOW, standbys=2)
    assert [line.subject for line in plan.lines] == ["new standby 1", "new standby 2"]
