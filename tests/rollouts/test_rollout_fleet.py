"""Rollouts with a real Postgres, a real Redis, and nodes that speak the protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import redis

from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.rollouts import RolloutDriver
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError, DeniedError, InvalidInputError, StaleError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.rollouts.domain.actions import MoveWave
from exaserve_ops.rollouts.models import Rollout, Wave
from exaserve_ops.rollouts.services.rollouts import (
    act_on_rollout,
    checked_policy,
    create_rollout,
    preview_rollout,
)
from exaserve_ops.rollouts.services.steps import advance_wave
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.services.deployments import (
    delete_deployment,
    scale_deployment,
    update_deployment,
)
from exaserve_ops.serving.services.releases import ReleaseWish
from exaserve_ops.validation.models import Validation
from exaserve_ops.validation.services import ValidationWish, ask_validation
from tests.fakes.fleet import make_deployment, seen
from tests.fakes.leader import leading
from tests.fakes.scripted_fleet import Fleet, State

pytestmark = pytest.mark.django_db

QUICK: dict[str, Any] = {
    "canary_soak_seconds": 0,
    "soak_seconds": 0,
    "min_requests": 0,
    "sessions_wait_seconds": 0,
}
V2 = ReleaseWish(engine_options={"max_num_seqs": 2})
V3 = ReleaseWish(engine_options={"max_num_seqs": 3})


@dataclass
class Stage:
    """A deployment on scripted nodes, and the driver of its rollouts."""

    fleet: Fleet
    deployment: Deployment

    def __post_init__(self) -> None:
        self.driver = RolloutDriver(self.fleet.leader.queue)
        self.watch: list[Callable[[], None]] = []

    def begin(self, wish: ReleaseWish = V2, **policy: Any) -> Rollout:
        chosen = checked_policy(QUICK | policy)
        now = clock.now()
        plan = preview_rollout(self.deployment.pk, wish, chosen, actor="user:test", now=now)
        assert plan.refusals == ()
        return create_rollout(
            self.deployment.pk, wish, chosen, reason="try", confirmed=plan.digest, actor="user:test", now=now
        )

    def turn(self) -> None:
        """One look of the driver, and everything that follows from it."""
        self.driver.step()
        self.fleet.leader.drain()
        self.fleet.beat()
        self.fleet.leader.work()
        for look in self.watch:
            look()

    def until(self, status: str, rollout: Rollout, *, turns: int = 80) -> Rollout:
        for _ in range(turns):
            rollout.refresh_from_db()
            if rollout.status == status:
                return rollout
            self.turn()
        rollout.refresh_from_db()
        waves = list(rollout.waves.values_list("number", "status", "why"))
        told = f"{rollout.status} ({rollout.why}), waits for {rollout.waits_for}; waves {waves}"
        raise AssertionError(f"not {status} after {turns} turns but {told}: {self.picture()}")

    def kept(self) -> list[Replica]:
        rows = Replica.objects.filter(deployment=self.deployment, wanted="run").exclude(status="stopped")
        return list(rows.select_related("release").order_by("name"))

    def releases(self) -> list[int]:
        return sorted(replica.release.number for replica in self.kept())

    def ready(self) -> int:
        return sum(replica.status == "ready" for replica in self.kept())

    def picture(self) -> str:
        rows = Replica.objects.filter(deployment=self.deployment).exclude(status="stopped")
        return str([(r.name, r.status, r.wanted, r.release.number, r.reason, r.healing_note) for r in rows])

    def refuse(self, release: int) -> None:
        """From now on replicas of a release are given up by their agents."""
        for replica in self.kept():
            if replica.release.number == release:
                gone = seen(replica, State.FAILED, reason="corrupt: model.safetensors has another digest")
                self.fleet.states[str(replica.pk)] = gone


@pytest.fixture
def stage(redis_client: redis.Redis) -> Iterator[Stage]:
    with leading(redis_client) as leader:
        fleet = Fleet(leader, redis_client, 3)
        deployment = make_deployment(replicas=4)
        fleet.settle()
        stage = Stage(fleet, deployment)
        assert stage.ready() == 4
        yield stage


def events_of(rollout: Rollout) -> list[str]:
    rows = Event.objects.filter(subject_kind="rollout", subject_id=str(rollout.pk)).order_by("pk")
    return list(rows.values_list("event", flat=True))


def test_deployment_moves_to_the_new_release_wave_by_wave(stage: Stage) -> None:
    rollout = stage.begin(max_surge="1", growth=["2"])
    least: list[int] = []
    stage.watch.append(lambda: least.append(stage.ready()))
    stage.until("done", rollout)
    assert stage.releases() == [2, 2, 2, 2]
    assert min(least) >= 4, "with room for one more nobody is missing at any time"
    stage.deployment.refresh_from_db()
    assert stage.deployment.release_number == 2
    assert stage.deployment.engine_options == {"max_num_seqs": 2}
    waves = list(rollout.waves.order_by("number"))
    assert [wave.status for wave in waves] == ["passed"] * len(waves)
    assert waves[0].planned == 1, "the canary"
    assert events_of(rollout)[:4] == ["created", "start", "wave_open", "wave_begin"]
    assert events_of(rollout)[-1] == "finish"


def test_without_room_old_replicas_drain_before_their_successors_start(redis_client: redis.Redis) -> None:
    with leading(redis_client) as leader:
        fleet = Fleet(leader, redis_client, 2)
        # Two nodes with room for three replicas each (of 1 GiB in 98% of 4 GiB), and all of it taken.
        for node in fleet.nodes:
            node.accelerator_bytes = 4 << 30
            node.say_hello()
        leader.work()
        stage = Stage(fleet, make_deployment(replicas=6))
        fleet.settle()
        assert stage.ready() == 6
        policy = checked_policy(QUICK | {"max_surge": "2", "max_unavailable": "0"})
        now = clock.now()
        plan = preview_rollout(stage.deployment.pk, V2, policy, actor="user:test", now=now)
        assert (plan.mode, plan.unavailable) == ("in_place", 1)
        assert "No room for one more replica" in plan.warnings[0]
        rollout = stage.begin(max_surge="2", max_unavailable="0")
        least: list[int] = []
        stage.watch.append(lambda: least.append(stage.ready()))
        stage.until("done", rollout)
        assert stage.releases() == [2] * 6
        assert min(least) == 5, "one at a time is missing, never more"


def test_bad_release_is_halted_at_the_canary_and_rolled_back_by_itself(stage: Stage) -> None:
    rollout = stage.begin(max_surge="1")
    stage.watch.append(lambda: stage.refuse(2))
    stage.until("rolled_back", rollout)
    assert stage.releases() == [1, 1, 1, 1]
    assert "given up" in Event.objects.get(event="roll_back", subject_id=str(rollout.pk)).reason
    rollout.refresh_from_db()
    assert "given up" in rollout.why, "its page still says why, after the end"
    touched = Replica.objects.filter(deployment=stage.deployment, release__number=2).count()
    assert touched == 1, "only the canary was tried"
    stage.deployment.refresh_from_db()
    assert stage.deployment.release_number == 1


def test_bad_release_without_room_is_undone_too(redis_client: redis.Redis) -> None:
    with leading(redis_client) as leader:
        fleet = Fleet(leader, redis_client, 2)
        for node in fleet.nodes:
            node.accelerator_bytes = 2 << 30
            node.say_hello()
        leader.work()
        stage = Stage(fleet, make_deployment(replicas=2))
        fleet.settle()
        rollout = stage.begin()
        stage.watch.append(lambda: stage.refuse(2))
        stage.until("rolled_back", rollout)
        fleet.settle()
        assert stage.releases() == [1, 1]
        assert stage.ready() == 2


def test_policy_may_halt_instead_and_a_person_turns_back(stage: Stage) -> None:
    rollout = stage.begin(max_surge="1", on_failure="halt")
    stage.watch.append(lambda: stage.refuse(2))
    stage.until("halted", rollout)
    assert stage.ready() == 4, "the old ones serve on"
    act_on_rollout(rollout.pk, "roll_back", actor="user:test", now=clock.now(), reason="enough")
    stage.until("rolled_back", rollout)
    assert stage.releases() == [1, 1, 1, 1]


def test_pause_at_a_chosen_wave_holds_until_somebody_lets_it_go_on(stage: Stage) -> None:
    rollout = stage.begin(max_surge="1", approve_waves=[2])
    stage.until("paused", rollout)
    assert stage.releases() == [1, 1, 1, 2]
    for _ in range(4):
        stage.turn()
    assert stage.releases() == [1, 1, 1, 2]
    act_on_rollout(rollout.pk, "resume", actor="user:test", now=clock.now(), reason="looks good")
    stage.until("done", rollout)
    assert stage.releases() == [2, 2, 2, 2]


def test_not_enough_answers_hold_the_wave_and_halt_it_at_the_deadline(stage: Stage) -> None:
    rollout = stage.begin(max_surge="1", min_requests=5, data_deadline_seconds=3600)
    for _ in range(12):
        stage.turn()
    rollout.refresh_from_db()
    assert rollout.status == "running"
    assert "0 of 5 answers that a verdict needs" in rollout.waits_for
    Wave.objects.filter(rollout=rollout).update(since=clock.now() - timedelta(hours=2))
    stage.until("halted", rollout)
    assert "not enough is known after 3600 s" in rollout.why


def test_second_approver_is_somebody_else(stage: Stage) -> None:
    rollout = stage.begin(second_approver=True)
    stage.turn()
    rollout.refresh_from_db()
    assert (rollout.status, stage.releases()) == ("planned", [1, 1, 1, 1])
    with pytest.raises(DeniedError, match="somebody else"):
        act_on_rollout(rollout.pk, "approve", actor="user:test", now=clock.now(), reason="me")
    act_on_rollout(rollout.pk, "approve", actor="user:other", now=clock.now(), reason="read it")
    assert stage.until("done", rollout).approved_by == "user:other"
    with pytest.raises(IllegalTransitionError):
        act_on_rollout(rollout.pk, "approve", actor="user:test", now=clock.now(), reason="late")


def test_what_is_not_confirmed_as_it_is_planned_now_does_not_begin(stage: Stage) -> None:
    policy = checked_policy(QUICK)
    plan = preview_rollout(stage.deployment.pk, V2, policy, actor="user:test", now=clock.now())

    def create(wish: ReleaseWish = V2, confirmed: str = plan.digest, reason: str = "try") -> Rollout:
        return create_rollout(
            stage.deployment.pk, wish, policy, reason=reason, confirmed=confirmed, actor="user:test",
            now=clock.now(),
        )  # fmt: skip

    with pytest.raises(StaleError, match="another one by now"):
        create(V3)
    with pytest.raises(InvalidInputError, match="say why"):
        create(reason=" ")
    with pytest.raises(ConflictError, match="runs release 1 already"):
        create(ReleaseWish())
    assert not Rollout.objects.exists()
    scale_deployment(stage.deployment.pk, replicas=3, actor="user:test", now=clock.now())
    stage.fleet.settle()
    with pytest.raises(StaleError):
        create()
    plan = preview_rollout(stage.deployment.pk, V2, policy, actor="user:test", now=clock.now())
    assert create(confirmed=plan.digest).status == "running"
    with pytest.raises(ConflictError, match="let that one end first"):
        create(V3)


def test_deployment_that_requires_a_go_rolls_out_nothing_without(stage: Stage) -> None:
    update_deployment(stage.deployment.pk, {"requires_go": True}, actor="user:test", now=clock.now())
    policy = checked_policy(QUICK)

    def refusals() -> tuple[str, ...]:
        plan = preview_rollout(stage.deployment.pk, V2, policy, actor="user:test", now=clock.now())
        return plan.refusals

    [refusal] = refusals()
    assert "no validation of tiny on simulated has ended with one" in refusal
    wish = ValidationWish(stage.deployment.model_id, ("simulated",))
    validation = ask_validation(wish, reason="try", actor="user:test", now=clock.now())
    validation.checks.update(status="passed")
    Validation.objects.filter(pk=validation.pk).update(status="go", ended_at=clock.now())
    assert refusals() == ()


def test_rollout_that_cannot_be_read_holds_up_no_other_and_says_so(stage: Stage) -> None:
    bad = stage.begin(max_surge="1")
    other = Stage(stage.fleet, make_deployment(replicas=1, name="other"))
    stage.fleet.settle()
    good = other.begin(max_surge="1")
    Rollout.objects.filter(pk=bad.pk).update(policy={"canary": "none of it"})
    other.until("done", good)
    bad.refresh_from_db()
    assert bad.status == "running"
    assert "nobody can look at it: give a number of replicas" in bad.waits_for


def test_rollout_ends_with_its_deployment(stage: Stage) -> None:
    rollout = stage.begin(max_surge="1")
    stage.turn()
    delete_deployment(stage.deployment.pk, actor="user:test", now=clock.now())
    stage.until("cancelled", rollout)
    stage.fleet.settle()
    assert stage.kept() == []


def test_replicas_made_while_it_runs_are_moved_at_the_end(stage: Stage) -> None:
    rollout = stage.begin(max_surge="1")
    stage.turn()
    scale_deployment(stage.deployment.pk, replicas=6, actor="user:test", now=clock.now())
    stage.until("done", rollout, turns=120)
    assert stage.releases() == [2] * 6


def test_second_rollout_is_refused_however_the_first_one_stands(stage: Stage) -> None:
    rollout = stage.begin(max_surge="1")
    for act in ("pause", "roll_back"):
        now = clock.now()
        act_on_rollout(rollout.pk, act, actor="user:test", now=now, reason="try")
        plan = preview_rollout(stage.deployment.pk, V3, checked_policy(QUICK), actor="user:test", now=now)
        assert any("let that one end first" in refusal for refusal in plan.refusals)
        with pytest.raises(ConflictError, match="let that one end first"):
            create_rollout(
                stage.deployment.pk,
                V3,
                checked_policy(QUICK),
                reason="try",
                confirmed=plan.digest,
                actor="user:test",
                now=now,
            )


def test_wave_that_is_opened_anew_has_others_and_goes_on(stage: Stage) -> None:
    rollout = stage.begin(max_surge="1")
    first = rollout.waves.get(number=1)
    for _ in range(10):
        stage.turn()
        first.refresh_from_db()
        if first.status == "moving":
            break
    advance_wave(rollout, MoveWave(1, "reopen", "nothing is left of it"), clock.now())
    first.refresh_from_db()
    assert (first.status, first.members.count()) == ("waiting", 0)
    assert first.domains == [first.domain]
    stage.until("done", rollout)
    assert stage.releases() == [2, 2, 2, 2]
