"""The driver of validations, with real stores, scripted nodes, and an engine that is made up."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
import redis
from django.db import connection

from exaserve_ops.controllers.validations import ValidationDriver
from exaserve_ops.lib import clock
from exaserve_ops.routing.selectors import routes, served_models
from exaserve_ops.serving.domain.lifecycle import DELETED
from exaserve_ops.serving.domain.trials import is_private
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.deployments import delete_deployment
from exaserve_ops.validation.domain.asking import Answer, Ask, LookAtLoad, Procedure, Subject
from exaserve_ops.validation.domain.driving import STARTING
from exaserve_ops.validation.domain.lifecycle import VALIDATION
from exaserve_ops.validation.domain.model_checks import MODEL_JUDGES
from exaserve_ops.validation.domain.probing import Target
from exaserve_ops.validation.domain.procedures import PROCEDURES
from exaserve_ops.validation.domain.prompts import draw_tokens, load_prompt_tokens
from exaserve_ops.validation.models import Validation
from exaserve_ops.validation.selectors import latest_go, validation_view
from exaserve_ops.validation.services import ValidationWish, ask_validation, cancel_validation
from tests.fakes.fleet import seen
from tests.fakes.leader import leading
from tests.fakes.made_up_engine import MadeUpEngine
from tests.fakes.scripted_fleet import Fleet, State
from tests.fakes.world import make_model
from workers.protocol.engines.sleeping import ASLEEP
from workers.protocol.observed import ReplicaObserved, ReplicaTelemetry

pytestmark = pytest.mark.django_db

LOOKS = 5
"""Of the driver between two heartbeats: it looks twice a second, and what it asks is answered at once."""
LOAD = ReplicaTelemetry(
    window_seconds=5.0,
    age_seconds=0.0,
    kv_total_blocks=1_000_000,
    kv_block_tokens=16,
    kv_used_ratio=0.0,
    requests_running=0,
    requests_waiting=0,
)


@dataclass
class MadeUpProbe:
    """Asks an engine that is made up, and remembers whom it was asked to ask."""

    engine: MadeUpEngine = field(default_factory=lambda: MadeUpEngine(most_context=2048))
    targets: list[Target] = field(default_factory=list)

    def token_of(self, target: Target) -> str | None:
        return f"key of {target.replica_id}"

    def ask(self, target: Target, ask: Ask, *, seconds: float) -> Answer:  # noqa: ARG002 - the port's signature
        if not self.targets or self.targets[-1] != target:
            self.targets.append(target)
        return self.engine.answer(ask, 1)


@dataclass
class Stage:
    """A fleet, and the driver of its validations."""

    fleet: Fleet
    model: Model
    probe: MadeUpProbe = field(default_factory=MadeUpProbe)
    starts: bool = True

    def __post_init__(self) -> None:
        self.driver = ValidationDriver(self.fleet.leader.state, self.probe)

    def ask(self, *engines: str, **changes: Any) -> Validation:
        wish = ValidationWish(
            self.model.pk, engines or ("simulated",), idle_seconds=0, most_at_once=2, most_launches=0
        )
        wish = replace(wish, **changes)
        return ask_validation(wish, reason="try", actor="user:test", now=clock.now())

    def turn(self) -> None:
        """A few looks of the driver, and everything that follows from them."""
        for _ in range(LOOKS):
            self.driver.step()
        self.fleet.leader.drain()
        rows = Replica.objects.filter(wanted="run").exclude(node=None).select_related("deployment")
        for row in rows:
            # Where it is told otherwise, it is not ready.
            seen_as = self.fleet.states.setdefault(str(row.pk), self.sighting(row))
            sighting = self.with_sleep(seen_as, asleep=row.deployment.standbys_sleep)
            self.fleet.states[str(row.pk)] = sighting
            self.probe.engine.is_asleep = sighting.sleep_state == ASLEEP
        self.fleet.beat()
        self.fleet.leader.work()

    def with_sleep(self, sighting: ReplicaObserved, *, asleep: bool) -> ReplicaObserved:
        """It sleeps at once, and wakes at once."""
        if not asleep and not sighting.sleep_state:
            return sighting
        state, woke = (ASLEEP, None) if asleep else ("", 1.5)
        return msgspec.structs.replace(sighting, sleep_state=state, woke_in_seconds=woke)

    def sighting(self, row: Replica) -> ReplicaObserved:
        if self.starts:
            return seen(row, State.READY, telemetry=LOAD)
        return seen(row, State.FAILED, reason="out of memory")

    def until(self, done: Callable[[], bool], what: str, *, turns: int = 300) -> None:
        for _ in range(turns):
            if done():
                return
            self.turn()
        shown = [(c.name, c.engine, c.status, c.why) for c in Validation.objects.get().checks.all()]
        raise AssertionError(f"not {what} after {turns} turns: {shown}")

    def end(self, validation: Validation) -> Validation:
        def ended() -> bool:
            validation.refresh_from_db()
            return validation.status in VALIDATION.final and validation.trial is None

        self.until(ended, "ended")
        return validation


@pytest.fixture
def stage(redis_client: redis.Redis) -> Iterator[Stage]:
    with leading(redis_client) as leader:
        yield Stage(Fleet(leader, redis_client, 2), make_model())


def test_model_is_tried_in_a_deployment_of_its_own_that_nobody_can_reach(stage: Stage) -> None:
    validation = stage.ask()
    stage.until(lambda: bool(stage.probe.targets), "asked")
    trial = Deployment.objects.get()
    assert is_private(trial.served_name)
    assert trial.served_name not in served_models()
    assert [record.model for record in routes().values()] == [trial.served_name], "gateways try to connect"
    ended = stage.end(validation)
    found = {check.name: (check.status, check.why) for check in ended.checks.all()}
    failed = {name: told for name, told in found.items() if told[0] == "failed"}
    # The record of a made-up model has no manifest; all else is as it should be.
    assert set(failed) == {"weights"}, failed
    assert ended.status == "no_go"
    trial.refresh_from_db()
    assert trial.status == DELETED
    assert len({target.replica_id for target in stage.probe.targets}) == 2, "launched again once"


def test_settings_are_searched_by_launches_of_releases_of_their_own(stage: Stage) -> None:
    validation = stage.ask(most_launches=6, engine_options={"simulated": {"ttft_ms": 1}})
    ended = stage.end(validation)
    tuning = ended.checks.get(name="tuning")
    assert tuning.status == "passed", tuning.why
    assert [(row["sequences"], row["launches"]) for row in tuning.details["settings"]] == [(0, 1), (1, 1)]
    assert tuning.details["best"] is None, "an engine that is as quick with any is left as it is"
    trial = Deployment.objects.get()
    assert [release.engine_options for release in trial.releases.order_by("number")] == [
        {"ttft_ms": 1},
        {"ttft_ms": 1, "max_num_seqs": 1},
    ]
    replicas = Replica.objects.filter(deployment=trial).count()
    assert replicas == 3, (
        "launched, launched again, and once with another setting: what runs is measured first"
    )
    assert trial.status == DELETED


def test_setting_that_does_not_start_is_told_and_is_no_reason_for_a_no(stage: Stage) -> None:
    validation = stage.ask(most_launches=2)
    stage.until(lambda: validation.checks.filter(name="tuning", status="checking").exists(), "searching")
    stage.starts = False
    ended = stage.end(validation)
    tuning = ended.checks.get(name="tuning")
    assert tuning.status == "passed"
    assert [row["why"] for row in tuning.details["settings"]] == ["", "out of memory"]
    assert "settings" not in ended.why


def test_second_launch_that_fails_is_told_at_once_with_its_reason(stage: Stage) -> None:
    validation = stage.ask()
    stage.until(lambda: validation.checks.filter(name="again", status="checking").exists(), "that far")
    stage.starts = False
    ended = stage.end(validation)
    again = ended.checks.get(name="again")
    assert (again.status, "out of memory" in again.why) == ("failed", True), again.why


def test_check_that_breaks_stops_none_of_the_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks_in_the_middle(subject: Subject) -> Procedure:
        yield LookAtLoad()
        raise ZeroDivisionError(subject.engine)

    def breaks_at_once(subject: Subject) -> Procedure:
        raise KeyError(subject.engine)

    monkeypatch.setitem(PROCEDURES, "prefix", breaks_in_the_middle)  # type: ignore[arg-type]  # a dict
    monkeypatch.setitem(PROCEDURES, "context", breaks_at_once)  # type: ignore[arg-type]  # a dict
    monkeypatch.setitem(MODEL_JUDGES, "config", lambda model: model.layers // 0)
    ended = stage.end(stage.ask())
    failed = failed_of(ended)
    assert set(failed) == {"config", "prefix", "context"}
    assert all("the check itself broke" in why for why in failed.values())
    assert ended.checks.get(name="again").status == "passed"


def test_nothing_is_asked_of_what_was_cancelled(stage: Stage) -> None:
    validation = stage.ask(most_launches=6)
    stage.until(lambda: validation.checks.filter(name="tuning", status="checking").exists(), "searching")
    stage.until(lambda: Replica.objects.filter(release__number=2).exists(), "launched with another setting")
    asked, replicas = stage.probe.engine.asked, Replica.objects.count()
    cancel_validation(validation.pk, reason="enough", actor="user:test", now=clock.now())
    stage.end(validation)
    assert (stage.probe.engine.asked, Replica.objects.count()) == (asked, replicas)
    assert not Replica.objects.exclude(status="stopped").exists()


def test_requests_of_a_check_that_is_over_are_not_sent_any_more(stage: Stage) -> None:
    asked = threading.Event()
    cancelled = threading.Event()
    count = itertools.count()

    class Slow(MadeUpProbe):
        def ask(self, target: Target, ask: Ask, *, seconds: float) -> Answer:
            if next(count) == 0:
                asked.set()
                assert cancelled.wait(timeout=60)
            return super().ask(target, ask, seconds=seconds)

    stage.driver = ValidationDriver(stage.fleet.leader.state, Slow())
    validation = stage.ask()
    stage.until(asked.is_set, "asked", turns=100)
    cancel_validation(validation.pk, reason="enough", actor="user:test", now=clock.now())
    stage.driver.step()
    cancelled.set()
    stage.end(validation)
    threads = [one for one in threading.enumerate() if one.name.startswith("validation")]
    for thread in threads:
        thread.join(timeout=60)
    assert next(count) == 1, "of eight prompts one was sent"


def test_requests_that_are_to_be_at_once_are_at_once(stage: Stage) -> None:
    most = 128
    meeting = threading.Barrier(most)

    class Meeting(MadeUpProbe):
        def ask(self, target: Target, ask: Ask, *, seconds: float) -> Answer:
            assert target.token == f"key of {target.replica_id}"
            assert connection.connection is None, (
                "a thread that asks needs no database, which has few connections"
            )
            if ask.tokens in together:
                meeting.wait(timeout=60)  # breaks unless so many are asked at the same time
            return super().ask(target, ask, seconds=seconds)

    vocabulary = stage.model.architecture["vocabulary"]
    together = {
        draw_tokens(f"ramp {most}, warm-up {n}", load_prompt_tokens(2048), vocabulary=vocabulary)
        for n in range(most)
    }
    stage.driver = ValidationDriver(stage.fleet.leader.state, Meeting())
    ended = stage.end(stage.ask(most_at_once=most))
    ramp = ended.checks.get(name="concurrency")
    assert [level["at_once"] for level in ramp.details["levels"]][-1] == most
    assert not meeting.broken


def test_replica_of_a_trial_sleeps_and_is_woken_where_its_engine_can(stage: Stage) -> None:
    validation = stage.ask(engine_options={"simulated": {"enable_sleep_mode": True}})
    ended = stage.end(validation)
    slept = ended.checks.get(name="sleep")
    assert (slept.status, slept.figure) == ("passed", "woke in 1.5 s"), slept.why
    other = stage.end(stage.ask())
    assert "only with the option enable_sleep_mode" in other.checks.get(name="sleep").why


def left_asleep(stage: Stage) -> Validation:
    """A validation whose trial sleeps, in a rest that does not end."""
    validation = stage.ask(engine_options={"simulated": {"enable_sleep_mode": True}})
    stage.until(lambda: validation.checks.filter(name="idle", status="passed").exists(), "that far")
    Validation.objects.filter(pk=validation.pk).update(idle_seconds=3600)
    stage.until(lambda: Replica.objects.filter(sleep_state=ASLEEP).exists(), "asleep")
    Validation.objects.filter(pk=validation.pk).update(idle_seconds=0)
    assert validation.checks.get(name="sleep").status == "checking"
    return validation


def failed_of(validation: Validation) -> dict[str, str]:
    """What failed and why; the record of a made-up model has no manifest, which is not asked here."""
    rows = validation.checks.filter(status="failed").exclude(name="weights")
    return dict(rows.values_list("name", "why"))


def test_controller_that_finds_a_trial_asleep_wakes_it_and_checks_its_sleep_again(stage: Stage) -> None:
    validation = left_asleep(stage)
    stage.driver = ValidationDriver(stage.fleet.leader.state, stage.probe)
    ended = stage.end(validation)
    assert failed_of(ended) == {}
    assert ended.checks.get(name="sleep").figure == "woke in 1.5 s"


def test_sleep_that_took_too_long_is_no_fault_of_the_checks_that_follow(stage: Stage) -> None:
    validation = left_asleep(stage)
    validation.checks.filter(name="sleep").update(began_at=clock.now() - timedelta(days=1))
    stage.driver.step()
    validation.refresh_from_db()
    trial = validation_view(validation, runs_here=False).trial
    assert trial.state == STARTING, "a sleeper is ready, and answers nobody"
    assert "is woken" in trial.why
    ended = stage.end(validation)
    assert failed_of(ended) == {"sleep": "it took longer than 5400 s"}
    assert {c.name: c.status for c in ended.checks.filter(name__in=["blocks", "again"])} == {
        "blocks": "passed",
        "again": "passed",
    }


def test_another_controller_goes_on_where_one_died(stage: Stage) -> None:
    validation = stage.ask()
    stage.until(lambda: validation.checks.filter(name="chat", status="passed").exists(), "half done")
    before = {c.name: c.ended_at for c in validation.checks.exclude(ended_at=None)}
    stage.driver = ValidationDriver(stage.fleet.leader.state, stage.probe)
    stage.end(validation)
    after = {c.name: c.ended_at for c in validation.checks.all()}
    assert {name: after[name] for name in before} == before, "what was found stays found"
    assert Deployment.objects.count() == 1, "it goes on in the same trial"


def test_engine_that_does_not_start_fails_its_launch_and_leaves_nothing(stage: Stage) -> None:
    validation = stage.ask()
    stage.starts = False
    ended = stage.end(validation)
    launch = ended.checks.get(name="launch")
    assert launch.status == "failed"
    assert "out of memory" in launch.why
    assert ended.checks.get(name="golden").status == "skipped"
    assert Deployment.objects.get().status == DELETED


def test_trial_that_somebody_deletes_fails_what_needed_it(stage: Stage) -> None:
    validation = stage.ask()
    stage.until(lambda: validation.checks.filter(name="golden", status="passed").exists(), "half done")
    delete_deployment(Deployment.objects.get().pk, actor="user:test", now=clock.now(), by_validation=True)
    ended = stage.end(validation)
    assert ended.status == "no_go"
    assert ended.checks.filter(status="failed", why__contains="gone").exists()


def test_cancelled_one_is_cleared_away(stage: Stage) -> None:
    validation = stage.ask()
    stage.until(lambda: validation.checks.filter(name="prefix", status="passed").exists(), "half done")
    cancel_validation(validation.pk, reason="enough", actor="user:test", now=clock.now())
    assert stage.end(validation).status == "cancelled"
    assert Deployment.objects.get().status == DELETED


def test_broken_record_of_one_holds_up_no_other(stage: Stage) -> None:
    bad = stage.ask()
    Validation.objects.filter(pk=bad.pk).update(status="running", engine_options={"simulated": {"dtype": 7}})
    bad.checks.filter(name="hashing").update(name="made up")
    other = make_model("other")
    stage.model = other
    good = stage.ask()
    ended = stage.end(good)
    assert ended.status == "no_go"
    bad.refresh_from_db()
    assert "nobody can look at it" in bad.waits_for


def test_go_of_an_engine_is_taken_back_by_a_newer_no(stage: Stage) -> None:
    def ended(status: str, failed: str, at: datetime) -> Validation:
        validation = stage.ask()
        validation.checks.update(status="passed")
        validation.checks.filter(name=failed).update(status="failed")
        Validation.objects.filter(pk=validation.pk).update(status=status, ended_at=at)
        return validation

    now = clock.now()
    assert latest_go(stage.model.pk, "simulated") is None
    good = ended("go", "", now)
    found = latest_go(stage.model.pk, "simulated")
    assert found is not None
    assert found.pk == good.pk
    assert latest_go(stage.model.pk, "vllm") is None
    ended("no_go", "prefix", now + timedelta(minutes=1))
    assert latest_go(stage.model.pk, "simulated") is None
    again = ended("go", "", now + timedelta(minutes=2))
    found = latest_go(stage.model.pk, "simulated")
    assert found is not None
    assert found.pk == again.pk


def test_model_of_which_nobody_knows_what_it_takes_fails_its_launch_at_once(stage: Stage) -> None:
    Model.objects.update(max_context_tokens=None, config={}, architecture={})
    ended = stage.end(stage.ask())
    launch = ended.checks.get(name="launch")
    assert (launch.status, ended.status) == ("failed", "no_go")
    assert "how much memory a replica needs is not known" in launch.why
    assert "say how much" in launch.why, "it says what to do"
    weighed = stage.end(stage.ask(replica_memory_bytes=1 << 30))
    assert weighed.checks.get(name="launch").status == "passed"
