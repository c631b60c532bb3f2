"""What is said of a replica over several nodes when it ends."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.gang_rules import BackOff, Follow, GangFacts, MemberFacts, plan_gang_step

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_all_members_that_ended_are_named_since_the_first_may_not_be_to_blame() -> None:
    members = (
        MemberFacts(0, "n0", states.FAILED, epoch=1, generation=2, reason="exited with code 1"),
        MemberFacts(1, "n1", states.READY, epoch=1, generation=2),
        MemberFacts(2, "n2", states.FAILED, epoch=1, generation=2, reason="killed by SIGKILL"),
    )
    began = NOW - timedelta(seconds=60)
    facts = GangFacts(states.READY, "run", 2, members, epoch=1, began_at=began, ready_at=began)
    step = plan_gang_step(facts, now=NOW)
    assert isinstance(step, BackOff)
    assert step.why == (
        "crash 1 of 6: start 1: node n0, member 0 of 3: exited with code 1; "
        "node n2, member 2 of 3: killed by SIGKILL"
    )


@pytest.mark.parametrize(("epoch", "generation"), [(1, 2), (2, 3)])
def test_what_was_said_of_the_last_start_is_no_reason_of_the_next(epoch: int, generation: int) -> None:
    members = (
        MemberFacts(0, "n0", states.STARTING, epoch=2, generation=4),
        MemberFacts(1, "n1", states.STOPPED, epoch=epoch, generation=generation, reason="killed by SIGKILL"),
    )
    for status in (states.PLACED, states.UNREACHABLE):
        facts = GangFacts(
            status, "run", 4, members, epoch=2, began_at=NOW, ready_by=NOW + timedelta(seconds=60)
        )
        step = plan_gang_step(facts, now=NOW)
        assert isinstance(step, Follow)
        assert (step.event, step.why) == (
            "seen_starting",
            "node n1, member 1 of 2: nothing heard of start 2 yet",
        )
    late = plan_gang_step(replace(facts, status=states.STARTING), now=NOW + timedelta(seconds=61))
    assert isinstance(late, BackOff)
    assert late.why.endswith("not all ready after 61 s: node n1, member 1 of 2: nothing heard of start 2 yet")
