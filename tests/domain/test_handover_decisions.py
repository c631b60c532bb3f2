"""How long a replica that is let go waits for its conversations."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from exaserve_ops.sessions.domain.handover import HandedOver, LeavingReplica, decide_handover

BEGAN = datetime(2030, 1, 1, tzinfo=UTC)
LEAVING = LeavingReplica("r", BEGAN, BEGAN + timedelta(seconds=60), 3, 1, has_targets=True)
SOON = BEGAN + timedelta(seconds=5)


def test_sessions_are_waited_for_until_three_quarters_of_the_time_to_drain() -> None:
    assert decide_handover(LEAVING, SOON) is None
    assert decide_handover(LEAVING, BEGAN + timedelta(seconds=44)) is None
    over = decide_handover(LEAVING, BEGAN + timedelta(seconds=45))
    assert over == HandedOver(3, "its time to hand sessions over is up")


@pytest.mark.parametrize(
    ("facts", "left"),
    [
        ({"engine_answers": False}, 3),
        ({"has_targets": False}, 3),
        ({"sessions_left": 0, "moves_underway": 0}, 0),
        ({"drained_by": None}, 3),
    ],
)
def test_nobody_waits_for_what_will_not_come(facts: dict[str, object], left: int) -> None:
    over = decide_handover(replace(LEAVING, **facts), SOON)  # type: ignore[arg-type]  # names are checked by replace
    assert over is not None
    assert over.left_behind == left


def test_turn_that_runs_may_be_a_sessions_first_and_is_waited_for() -> None:
    gone = replace(LEAVING, sessions_left=0, moves_underway=0)
    assert decide_handover(replace(gone, open_requests=2, reported_at=SOON), SOON) is None
    early = BEGAN + timedelta(seconds=1)
    assert decide_handover(replace(gone, open_requests=0, reported_at=early), SOON) is None, "older news"
    assert decide_handover(replace(gone, open_requests=0, reported_at=SOON), SOON) is not None
    assert decide_handover(replace(gone, moves_underway=1), SOON) is None
