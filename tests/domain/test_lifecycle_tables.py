"""Lifecycle tables: every status is reachable and every way ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.inventory.domain.installation import INSTALLATION
from exaserve_ops.inventory.domain.liveness import NODE_LIVENESS
from exaserve_ops.lib.lifecycle import IllegalTransitionError, Lifecycle, table
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA
from exaserve_ops.sessions.domain.moves import RELOCATION

LIFECYCLES = [DEPLOYMENT, REPLICA, NODE_LIVENESS, INSTALLATION, RELOCATION]
EVENTS = {lifecycle.name: sorted({event for _, event in lifecycle.transitions}) for lifecycle in LIFECYCLES}


def reachable(lifecycle: Lifecycle, start: str) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        status = todo.pop()
        for (source, _), target in lifecycle.transitions.items():
            if source == status and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


@pytest.mark.parametrize("lifecycle", LIFECYCLES, ids=lambda lifecycle: lifecycle.name)
def test_every_status_is_reachable_named_and_explained(lifecycle: Lifecycle) -> None:
    assert reachable(lifecycle, lifecycle.initial) == set(lifecycle.statuses)
    used = {s for s, _ in lifecycle.transitions} | set(lifecycle.transitions.values())
    assert used == set(lifecycle.statuses) == set(lifecycle.meanings)
    assert len(lifecycle.statuses) == len(set(lifecycle.statuses))
    assert [value for value, _ in lifecycle.choices] == list(lifecycle.statuses)


@pytest.mark.parametrize("lifecycle", LIFECYCLES, ids=lambda lifecycle: lifecycle.name)
def test_final_statuses_have_no_exit_and_all_others_do(lifecycle: Lifecycle) -> None:
    sources = {status for status, _ in lifecycle.transitions}
    assert sources == set(lifecycle.live)
    if lifecycle.final:
        assert all(reachable(lifecycle, s) & lifecycle.final for s in lifecycle.statuses)


@given(st.sampled_from(LIFECYCLES), st.data())
def test_any_course_of_events_stays_in_the_table(lifecycle: Lifecycle, data: st.DataObject) -> None:
    status = lifecycle.initial
    for event in data.draw(st.lists(st.sampled_from(EVENTS[lifecycle.name]), max_size=30)):
        if lifecycle.allows(status, event):
            assert status not in lifecycle.final
            status = lifecycle.next(status, event)
            assert status in lifecycle.statuses
        else:
            with pytest.raises(IllegalTransitionError):
                lifecycle.next(status, event)


@given(st.lists(st.sampled_from([e for e in EVENTS["replica"] if e.startswith("seen_")]), max_size=20))
def test_no_sighting_revives_a_replica_that_was_let_go(sightings: list[str]) -> None:
    let_go = {states.DRAINING, states.STOPPING, states.STOPPED}
    for start in let_go:
        status = start
        for event in sightings:
            if REPLICA.allows(status, event):
                status = REPLICA.next(status, event)
        assert status in let_go


def test_only_pending_replicas_and_those_of_retired_nodes_end_unseen() -> None:
    ends = {
        (source, event) for (source, event), target in REPLICA.transitions.items() if target == states.STOPPED
    }
    assert {event for _, event in ends} == {"cancel", "seen_stopped", "write_off"}
    assert [source for source, event in ends if event == "cancel"] == [states.PENDING]
    assert states.PENDING not in {source for source, event in ends if event == "write_off"}


def test_two_rows_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="two targets"):
        table([("go", ["a"], "b"), ("go", ["a"], "c")])


@pytest.mark.parametrize("lifecycle", LIFECYCLES, ids=lambda lifecycle: lifecycle.name)
def test_diagram_draws_each_transition(lifecycle: Lifecycle) -> None:
    text = lifecycle.mermaid()
    for (source, event), target in lifecycle.transitions.items():
        [line] = [line for line in text.splitlines() if line.strip().startswith(f"{source} --> {target}:")]
        assert event in line
