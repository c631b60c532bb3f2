"""Weights are fetched ahead where the policy says, while it is quiet, and a few nodes at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.weights.domain.held import ABSENT, FAILED, FETCHING, READY
from exaserve_ops.weights.domain.prewarm import PrewarmNode, PrewarmRules, is_open, plan_prewarm

NIGHT = PrewarmRules("r", from_minute=22 * 60, until_minute=6 * 60, at_once=2)


def node(name: str, **facts: object) -> PrewarmNode:
    return PrewarmNode(**({"node_id": name, "name": name, "accepts": True, "busy_ratio": None} | facts))  # type: ignore[arg-type]  # facts of a test


def test_a_window_may_go_past_midnight() -> None:
    assert [is_open(NIGHT, hour * 60) for hour in (21, 22, 23, 0, 5, 6, 12)] == [
        *(False, True, True, True, True, False, False)
    ]
    assert is_open(PrewarmRules("r"), 0)
    assert is_open(PrewarmRules("r"), 24 * 60 - 1)


def test_a_few_at_once_those_that_fetch_already_first() -> None:
    nodes = [node("a"), node("b"), node("c", claimed=True, state=FETCHING), node("d")]
    plan = plan_prewarm(NIGHT, nodes, minute=0)
    assert plan.claim == ("a",)
    assert dict(plan.waits) == {"b": "2 others fetch it now", "d": "2 others fetch it now"}


def test_a_busy_node_is_paused_and_goes_on_when_it_is_quiet() -> None:
    busy = node("a", claimed=True, state=FETCHING, busy_ratio=0.8)
    plan = plan_prewarm(NIGHT, [busy], minute=0)
    assert plan.pause == ("a",)
    assert "80% busy; 50% is allowed" in dict(plan.waits)["a"]
    quiet = node("a", claimed=True, paused=True, state="paused", busy_ratio=0.2)
    assert plan_prewarm(NIGHT, [quiet], minute=0).resume == ("a",)


def test_outside_the_window_what_is_there_is_kept_and_the_rest_waits() -> None:
    nodes = [node("a", state=READY, claimed=True), node("b", claimed=True, state=FETCHING), node("c")]
    plan = plan_prewarm(NIGHT, nodes, minute=12 * 60)
    assert (plan.claim, plan.pause, plan.release) == ((), ("b",), ())
    assert dict(plan.waits) == dict.fromkeys(("b", "c"), "waits for 22:00 UTC")


def test_what_a_replica_brought_there_is_kept_too() -> None:
    assert plan_prewarm(NIGHT, [node("a", state=READY)], minute=12 * 60).claim == ("a",)


def test_nodes_that_are_named_no_more_are_released() -> None:
    rules = PrewarmRules("r", node_names=("a",))
    plan = plan_prewarm(rules, [node("a"), node("b", claimed=True, state=READY)], minute=0)
    assert (plan.claim, plan.release) == (("a",), ("b",))


def test_one_that_cannot_have_it_holds_no_place_of_others() -> None:
    nodes = [node("a", claimed=True, state=FAILED), node("b"), node("c")]
    assert plan_prewarm(NIGHT, nodes, minute=0).claim == ("b", "c")


NODES = st.lists(
    st.builds(
        PrewarmNode,
        node_id=st.sampled_from("abcdefgh"),
        name=st.sampled_from("xyz"),
        accepts=st.booleans(),
        busy_ratio=st.none() | st.floats(0, 1),
        state=st.sampled_from([ABSENT, FETCHING, READY, FAILED, "paused"]),
        claimed=st.booleans(),
        paused=st.booleans(),
    ),
    unique_by=lambda one: one.node_id,
)


@given(NODES, st.integers(0, 1439), st.integers(1, 4))
def test_no_more_than_allowed_fetch_and_each_node_has_one_answer(
    nodes: list[PrewarmNode], minute: int, at_once: int
) -> None:
    plan = plan_prewarm(PrewarmRules("r", node_names=("x", "y"), at_once=at_once), nodes, minute=minute)
    told = [*plan.claim, *plan.pause, *plan.resume, *plan.release]
    assert len(told) == len(set(told))
    after = {n.node_id for n in nodes if n.claimed and not n.paused} | set(plan.claim) | set(plan.resume)
    after -= set(plan.pause) | set(plan.release)
    fetching = [n for n in nodes if n.node_id in after and n.state not in (READY, FAILED)]
    assert len([n for n in fetching if n.name != "z"]) <= at_once
    assert not {node_id for node_id, _ in plan.waits} & after
