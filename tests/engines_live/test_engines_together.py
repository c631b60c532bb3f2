"""vLLM and the built-in engine in one fleet, from the pages: served, scaled, broken, drained, moved, rolled.

The steps share a fleet and stand in the order of a life; each brings it to what it needs first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from exaserve_ops.lib import clock
from tests.engines_live.conftest import Figures
from tests.engines_live.fleet import (
    BUILT_IN,
    DRAIN_SECONDS,
    ENGINES,
    FIRST,
    SECOND,
    START_SECONDS,
    VLLM,
    VLLM_OPTIONS,
    EngineFleet,
    alive,
)
from tests.engines_live.speaking import Conversation, LongStream
from tests.rollouts.talking import Answered, otherwise_answered

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3 * START_SECONDS)]

ENOUGH = 12
CARRIERS = {BUILT_IN: "tcp", VLLM: "nixl"}
"""What takes KV from one node to another."""
MOST_TIES_RATIO = 0.1
"""Answers that engines give otherwise, since what one rounds up to a tie the other rounds down."""
QUICK: dict[str, Any] = {
    "reason": "other weights",
    "canary_soak_seconds": 4,
    "soak_seconds": 2,
    "min_requests": 5,
    "warm_up_seconds": 2,
    "sessions_wait_seconds": 15,
    "max_ttft_ratio": 4,
    "max_itl_ratio": 4,
}


def test_both_engines_are_deployed_from_the_page(fleet: EngineFleet, figures: Figures) -> None:
    for name in (FIRST, SECOND):
        fleet.operator.register(name, str(fleet.folder(name)))
    common = {
        "model": FIRST,
        "start_seconds": START_SECONDS,
        "stall_seconds": 300,
        "drain_seconds": DRAIN_SECONDS,
    }
    own = {"name": BUILT_IN, "served_name": BUILT_IN, "engine": "torch", "replicas": 2}
    fleet.operator.deploy(common | own, {})
    own = {"name": VLLM, "served_name": VLLM, "engine": "vllm", "replicas": 1, "memory_mib": 2048}
    fleet.operator.deploy(common | own, VLLM_OPTIONS)
    figures(
        "deployed from the page",
        built_in_ready_seconds=fleet.have(BUILT_IN, 2),
        vllm_ready_seconds=fleet.have(VLLM, 1),
        vllm_started_in_seconds=fleet.replicas(VLLM)[0]["start_took_seconds"],
    )


def test_both_answer_side_by_side_as_each_other_would_and_the_pages_show_it(
    fleet: EngineFleet, figures: Figures, tmp_path: Path
) -> None:
    with fleet.load(BUILT_IN) as ours, fleet.load(VLLM) as theirs:
        loads = {BUILT_IN: ours, VLLM: theirs}
        fleet.wait_until(
            lambda: all(len(load.answered) >= ENOUGH for load in loads.values()), "answers of both"
        )
        shown = {name: shown_of(fleet, name) for name in loads}
    assert ours.failed + theirs.failed == []
    for name, load in loads.items():
        assert load.replicas() <= {row["id"] for row in fleet.replicas(name)}
        otherwise = otherwise_answered_ratio(fleet, load.answered, tmp_path / name)
        figures(
            f"{name} answers",
            answers=len(load.answered),
            failed=0,
            otherwise_than_twin_ratio=otherwise,
            **shown[name],
        )
        assert otherwise <= MOST_TIES_RATIO


def otherwise_answered_ratio(
    fleet: EngineFleet, answered: list[Answered], scratch: Path, models: Mapping[str, str] | None = None
) -> float:
    """Share of answers that are not those of a built-in engine beside the fleet.

    It has the weights of who answered, or of what `models` (by replica) says.
    """
    folders = {name: fleet.folder(name) for name in (FIRST, SECOND)}
    models = models or fleet.models_by_replica()
    with ThreadPoolExecutor(1) as pool:  # Playwright runs an event loop in the test's thread
        found = pool.submit(otherwise_answered, answered, folders, models, scratch).result()
    return len(found) / len(answered)


def shown_of(fleet: EngineFleet, deployment: str) -> dict[str, str]:
    """KV in use and TTFT of a deployment's first replica, once its pages show them."""
    row = fleet.replicas(deployment)[0]
    fleet.operator.open(f"/deployments/{row['deployment']}")
    cells = {kind: f"#replica-{row['id']} [data-load={kind}]" for kind in ("kv", "ttft")}
    found: dict[str, str] = {}

    def has_both() -> bool:
        found.update({kind: fleet.operator.page.inner_text(cell) for kind, cell in cells.items()})
        return all(any(letter.isdigit() for letter in text) for text in found.values())

    fleet.wait_until(has_both, f"figures of {deployment} on its page")
    told = fleet.operator.read(f"/replicas/{row['id']}", until="KV")
    assert ENGINES[deployment] in told
    return {"kv_used": found["kv"], "ttft_p95": found["ttft"]}


def test_vllm_is_scaled_up_under_load(fleet: EngineFleet, figures: Figures) -> None:
    with fleet.load(VLLM) as load:
        seconds = fleet.have(VLLM, 2)
        fleet.until_routed(load, {row["id"] for row in fleet.replicas(VLLM)})
    assert load.failed == []
    figures("vLLM scaled 1 to 2", seconds=seconds, answers=len(load.answered), failed=0)


def test_killed_core_is_seen_and_the_replica_restarted_as_one(fleet: EngineFleet, figures: Figures) -> None:
    fleet.have(VLLM, 2)
    with fleet.load(VLLM, continues=True) as load:
        fleet.until_routed(load, {row["id"] for row in fleet.replicas(VLLM)})
        victim = fleet.replicas(VLLM)[0]
        group = fleet.kill_core(victim["id"])
        died = time.monotonic()
        fleet.wait_until(lambda: fleet.replica(victim["id"])["status"] != "ready", "it is seen")
        seen_seconds = time.monotonic() - died
        fleet.wait_until(
            lambda: (
                (now := fleet.replica(victim["id"]))["status"] == "ready"
                and now["attempt"] == victim["attempt"] + 1
            ),
            "the next attempt is ready",
            seconds=START_SECONDS,
        )
        ready_seconds = time.monotonic() - died
    assert load.failed == []
    assert alive(group) == []
    figures(
        "EngineCore killed",
        seen_seconds=seen_seconds,
        ready_again_seconds=ready_seconds,
        answers=len(load.answered),
        failed=0,
    )


@pytest.mark.parametrize("deployment", [BUILT_IN, VLLM])
def test_stream_of_a_replica_that_is_drained_ends_whole(
    fleet: EngineFleet, figures: Figures, deployment: str
) -> None:
    fleet.have(deployment, 2)
    with fleet.gateway() as client, LongStream(client, deployment) as stream:
        fleet.operator.prepare_replacing(stream.replica, "to see whether its stream ends whole")
        before = stream.pieces
        fleet.operator.replace()
        text = stream.whole()
    ended_at = clock.now()
    gone_seconds = fleet.wait_until(
        lambda: fleet.replica(stream.replica)["status"] == "stopped",
        "its successor is ready and it has ended",
        seconds=START_SECONDS,
    )
    deadline = datetime.fromisoformat(fleet.replica(stream.replica)["drain_deadline_at"])
    drained_seconds = (ended_at - (deadline - timedelta(seconds=DRAIN_SECONDS))).total_seconds()
    figures(
        f"{deployment} drained",
        pieces_before=before,
        pieces=stream.pieces,
        streamed_while_draining_seconds=drained_seconds,
        stopped_after_seconds=gone_seconds,
    )
    assert text
    assert drained_seconds > 0, "it was over before the drain began"
    fleet.have(deployment, 2)


@pytest.mark.parametrize("deployment", [BUILT_IN, VLLM])
def test_conversation_is_moved_between_its_turns(
    fleet: EngineFleet, figures: Figures, deployment: str, tmp_path: Path
) -> None:
    fleet.have(deployment, 2)
    with fleet.gateway() as client:
        talk = Conversation(client, deployment)
        for asked in ("the river in winter " * 40, "a quiet garden", "one letter more"):
            talk.ask(asked)
        (home,) = {one.replica_id for one in talk.answered}
        (target,) = {row["id"] for row in fleet.replicas(deployment)} - {home}
        record = fleet.session(talk.name, turns=3)
        fleet.operator.move_session(record["id"], target, "to see whether it notices")
        move = fleet.move_of(record["id"])
        talk.ask("and after the move")
        after = fleet.session(talk.name, turns=4)
    assert (move["status"], move["way"], move["carrier"]) == ("done", "transfer", CARRIERS[deployment]), move
    assert talk.answered[-1].replica_id == target
    assert otherwise_answered_ratio(fleet, talk.answered, tmp_path) == 0
    figures(
        f"{deployment} conversation moved",
        carrier=move["carrier"],
        sent_bytes=move["sent_bytes"],
        send_seconds=move["send_seconds"],
        cached_tokens_of_next_turn=after["cached_tokens"] - record["cached_tokens"],
    )


def test_vllm_is_scaled_down_under_load(fleet: EngineFleet, figures: Figures) -> None:
    fleet.have(VLLM, 2)
    with fleet.load(VLLM) as load:
        fleet.until_routed(load, {row["id"] for row in fleet.replicas(VLLM)})
        seconds = fleet.have(VLLM, 1)
        fleet.wait_until(lambda: len(fleet.running(VLLM)) == 1, "the other has ended", seconds=DRAIN_SECONDS)
    assert load.failed == []
    figures("vLLM scaled 2 to 1", seconds=seconds, answers=len(load.answered), failed=0)


def test_other_weights_are_rolled_out_on_vllm(fleet: EngineFleet, figures: Figures, tmp_path: Path) -> None:
    fleet.have(VLLM, 1)
    began = time.monotonic()
    with fleet.load(VLLM) as load:
        rollout = fleet.operator.roll_out(fleet.named("deployments", VLLM), SECOND, QUICK)
        end = fleet.end_of(f"/rollouts/{rollout}")
    assert load.failed == []
    assert end["status"] == "done", end
    assert {wave["status"] for wave in end["waves"]} == {"passed"}
    assert [row["model_name"] for row in fleet.replicas(VLLM)] == [SECOND]
    assert "done" in fleet.operator.read(f"/rollouts/{rollout}").lower()
    by_replica = fleet.models_by_replica()
    assert {by_replica[one.replica_id] for one in load.answered} == {FIRST, SECOND}
    with fleet.load(VLLM) as after:
        fleet.wait_until(lambda: len(after.answered) >= ENOUGH, "answers of the new release")
    assert after.failed == []
    otherwise = otherwise_answered_ratio(fleet, [*load.answered, *after.answered], tmp_path / "own")
    old = otherwise_answered_ratio(fleet, after.answered, tmp_path / "old", dict.fromkeys(by_replica, FIRST))
    figures(
        "vLLM rolled to other weights",
        seconds=time.monotonic() - began,
        answers=len(load.answered),
        failed=0,
        otherwise_than_twin_ratio=otherwise,
        otherwise_than_old_weights_ratio=old,
    )
    assert otherwise <= MOST_TIES_RATIO
    assert old > 1 - MOST_TIES_RATIO, "what answers now has the other weights"


def test_model_is_validated_on_both_engines(fleet: EngineFleet, figures: Figures) -> None:
    began = time.monotonic()
    options = "\n".join(f"vllm: {name} = {value}" for name, value in VLLM_OPTIONS.items())
    fields = {
        "engine_options": options,
        "memory_mib": 2048,
        "most_at_once": 4,
        "idle_seconds": 2,
        "most_launches": 0,
        "reason": "does it serve here?",
    }
    key = fleet.operator.validate(fleet.named("models", SECOND), ("torch", "vllm"), fields)
    report = fleet.end_of(f"/validations/{key}")
    shown = fleet.operator.read(f"/validations/{key}", until=report["why"][:40])
    told = {f"{one['engine']} {one['name']}": one for one in report["checks"]}
    figures(
        "validated on both",
        seconds=time.monotonic() - began,
        verdict=report["status"],
        passed=sum(one["status"] == "passed" for one in told.values()),
        checks=len(told),
    )
    # Durations say nothing on a busy machine; all else does.
    wrong = {
        name: (one["status"], one["why"])
        for name, one in told.items()
        if one["status"] not in {"passed", "skipped"} and one["name"] != "idle"
    }
    assert wrong == {}
    assert "On torch" in shown
    assert "On vllm" in shown
