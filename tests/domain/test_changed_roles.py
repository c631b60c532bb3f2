"""A change of how many serve and stand by, in one write: what is there changes roles, and is not let go."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.facts import SERVING, STANDBY, DeploymentSnapshot, ReplicaFacts
from exaserve_ops.serving.domain.placement import PlacementRequest
from exaserve_ops.serving.domain.reconcile import plan_deployment, plan_takeover
from exaserve_ops.serving.domain.steps import Create, LetGo, Promote, StandDown, Step

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
RUNNING = (states.PLACED, states.STARTING, states.LOADING, states.READY, states.BACKING_OFF)
ALL = (*RUNNING, states.PENDING)


def one(index: int, status: str = states.READY, role: str = SERVING, **more: object) -> ReplicaFacts:
    born = NOW - timedelta(minutes=index)
    facts = ReplicaFacts(f"r{index}", f"r{index}", status, "run", "", 0, born, role=role)
    return replace(facts, **more)  # type: ignore[arg-type]  # a test's


def snapshot_of(replicas: tuple[ReplicaFacts, ...], serving: int, standbys: int) -> DeploymentSnapshot:
    request = PlacementRequest("torch", 1)
    return DeploymentSnapshot(
        "d", "chat", deleting=False, replicas_wanted=serving, request=request, replicas=replicas, nodes=(),
        standbys_wanted=standbys,
    )  # fmt: skip


def after(replicas: tuple[ReplicaFacts, ...], steps: tuple[Step, ...]) -> tuple[ReplicaFacts, ...]:
    """What is there once a plan has been carried out, and nothing has started meanwhile."""
    by_id = {r.id: r for r in replicas}
    for step in steps:
        match step:
            case Promote(replica_id=key, instead_of=absent):
                assert by_id[key].role == STANDBY
                by_id[key] = replace(by_id[key], role=SERVING)
                if absent:
                    by_id[absent] = replace(by_id[absent], role=STANDBY)
            case StandDown(replica_id=key):
                assert by_id[key].role == SERVING
                by_id[key] = replace(by_id[key], role=STANDBY)
            case LetGo(replica_id=key):
                del by_id[key]
            case Create(count=count, role=role):
                start = 100 + len(by_id)
                by_id |= {f"r{n}": one(n, states.PENDING, role) for n in range(start, start + count)}
            case _:
                pass
    return tuple(by_id.values())


def answering(replicas: tuple[ReplicaFacts, ...]) -> int:
    return sum(r.role == SERVING and r.status == states.READY and not r.sleeps for r in replicas)


@st.composite
def deployments(draw: st.DrawFn) -> tuple[ReplicaFacts, ...]:
    """Replicas of all statuses in both roles; standbys may sleep, and who has just been woken serves."""
    drawn = draw(
        st.lists(
            st.tuples(
                st.sampled_from((*ALL, states.READY, states.READY, states.FAILED, states.UNREACHABLE)),
                st.sampled_from((SERVING, STANDBY)),
                st.booleans(),
                st.integers(0, 3),
            ),
            max_size=8,
        )
    )
    return tuple(
        one(
            index,
            status,
            role,
            sleeps=sleeps and status == states.READY,
            active_sessions=sessions if status == states.READY and role == SERVING and not sleeps else 0,
        )
        for index, (status, role, sleeps, sessions) in enumerate(drawn)
    )


wishes = st.tuples(st.integers(0, 6), st.integers(0, 3))


@given(deployments(), wishes)
@example((one(0), one(1, role=STANDBY)), (2, 0))
@example((one(0), one(1, role=STANDBY, sleeps=True)), (2, 0))
@example((one(0), one(1)), (1, 1))
def test_nothing_that_runs_is_let_go_while_something_is_made(
    replicas: tuple[ReplicaFacts, ...], wish: tuple[int, int]
) -> None:
    steps = plan_deployment(snapshot_of(replicas, *wish), now=NOW)
    status_of = {r.id: r.status for r in replicas}
    gone = [step.replica_id for step in steps if isinstance(step, LetGo)]
    if any(isinstance(step, Create) for step in steps):
        assert {status_of[key] for key in gone} <= {states.FAILED, states.UNREACHABLE}
    there = after(replicas, steps)
    assert [sum(r.role == role for r in there) for role in (SERVING, STANDBY)] == list(wish)


@given(deployments(), wishes)
@example((one(0, role=STANDBY),), (1, 1))
def test_as_many_answer_at_once_as_are_wanted_and_ready(
    replicas: tuple[ReplicaFacts, ...], wish: tuple[int, int]
) -> None:
    serving, _ = wish
    steps = plan_deployment(snapshot_of(replicas, *wish), now=NOW)
    awake = sum(r.status == states.READY and not r.sleeps for r in replicas)
    assert answering(after(replicas, steps)) == min(serving, awake)


@given(deployments(), wishes)
def test_who_is_ready_is_let_go_only_where_all_that_are_left_are_ready_too(
    replicas: tuple[ReplicaFacts, ...], wish: tuple[int, int]
) -> None:
    steps = plan_deployment(snapshot_of(replicas, *wish), now=NOW)
    drained = [step for step in steps if isinstance(step, LetGo) and step.event == "drain"]
    if drained:
        assert all(r.status == states.READY for r in after(replicas, steps))


@given(deployments(), wishes)
def test_a_second_plan_finds_nothing_to_change(
    replicas: tuple[ReplicaFacts, ...], wish: tuple[int, int]
) -> None:
    there = after(replicas, plan_deployment(snapshot_of(replicas, *wish), now=NOW))
    again = plan_deployment(snapshot_of(there, *wish), now=NOW)
    assert not [step for step in again if isinstance(step, Create | LetGo | Promote | StandDown)]


@given(deployments(), wishes)
def test_the_quick_look_promotes_whom_the_whole_plan_would(
    replicas: tuple[ReplicaFacts, ...], wish: tuple[int, int]
) -> None:
    snapshot = snapshot_of(replicas, *wish)
    swaps = [s for s in plan_deployment(snapshot, now=NOW) if isinstance(s, Promote) and s.instead_of]
    assert list(plan_takeover(snapshot, now=NOW)) == swaps


def test_one_more_to_serve_and_one_less_to_stand_by_is_one_promotion() -> None:
    replicas = (one(0), one(1, role=STANDBY, status=states.LOADING), one(2, role=STANDBY, sleeps=True))
    [step] = plan_deployment(snapshot_of(replicas, 2, 1), now=NOW)
    assert isinstance(step, Promote)
    assert (step.replica_id, step.instead_of) == ("r2", "")
    assert step.why == "2 are to serve and 1 to stand by; this standby is woken"


def test_one_less_to_serve_and_one_more_to_stand_by_stands_the_idlest_down() -> None:
    replicas = (one(0, active_sessions=3), one(1, active_sessions=1), one(2, active_sessions=2))
    [step] = plan_deployment(snapshot_of(replicas, 2, 1), now=NOW)
    assert isinstance(step, StandDown)
    assert step.replica_id == "r1"
    assert step.why == "2 are to serve and 1 to stand by; fewest active sessions (1), which move"


def test_of_several_that_are_too_many_the_best_stands_by_and_the_others_go() -> None:
    replicas = (one(0, active_sessions=3), one(1, active_sessions=2), one(2), one(3, states.LOADING))
    steps = plan_deployment(snapshot_of(replicas, 1, 1), now=NOW)
    assert [s.replica_id for s in steps if isinstance(s, StandDown)] == ["r1"]
    assert [s.replica_id for s in steps if isinstance(s, LetGo)] == ["r3", "r2"]


def test_nobody_is_promoted_for_one_that_is_too_many_itself() -> None:
    replicas = (one(0), one(1), one(2, states.BACKING_OFF), one(3, role=STANDBY))
    [step] = plan_deployment(snapshot_of(replicas, 2, 1), now=NOW)
    assert isinstance(step, LetGo)
    assert (step.replica_id, step.event) == ("r2", "stop")


@pytest.mark.parametrize("status", [states.FAILED, states.UNREACHABLE])
def test_what_runs_no_more_changes_no_role(status: str) -> None:
    replicas = (one(0), one(1, status, role=STANDBY))
    steps = plan_deployment(snapshot_of(replicas, 2, 0), now=NOW)
    assert [type(s) for s in steps if isinstance(s, LetGo | Create | Promote)] == [LetGo, Create]


def test_a_standby_on_its_way_out_serves_together_with_the_one_that_takes_its_place() -> None:
    leaving = one(1, role=STANDBY, slow_reason="slow")
    replicas = (one(0), leaving, one(2, states.LOADING, STANDBY, replaces="r1"))
    snapshot = snapshot_of(replicas, 2, 0)
    snapshot = replace(snapshot, healing=replace(snapshot.healing, drain_slow=True))
    steps = plan_deployment(snapshot, now=NOW)
    assert {s.replica_id for s in steps if isinstance(s, Promote)} == {"r1", "r2"}
    assert not [s for s in steps if isinstance(s, LetGo | Create)]
