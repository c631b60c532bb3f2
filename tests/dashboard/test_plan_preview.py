"""What people read before they scale: pure."""

from __future__ import annotations

from datetime import UTC, datetime

from exaserve_ops.dashboard.plans import preview_deletion, preview_scale
from exaserve_ops.serving.domain.placement import AcceleratorRoom, NodeRoom, PlacementRequest
from exaserve_ops.serving.domain.reconcile import DeploymentSnapshot, ReplicaFacts

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
