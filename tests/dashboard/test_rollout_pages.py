"""Pages of rollouts: the plan before anything runs, waves that fill up, buttons that match."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.dashboard.rollouts import (
    FAILED,
    NEW,
    OLD,
    UNDER_WAY,
    Seat,
    buttons_of,
    cells_of,
    state_of_member,
    ttft_figure,
)
from exaserve_ops.rollouts.domain.gates import Answers, Health, judge
from exaserve_ops.rollouts.domain.lifecycle import ROLLOUT
from exaserve_ops.rollouts.domain.policy import RolloutPolicy
from exaserve_ops.rollouts.models import Rollout, Wave, WaveMember
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.services.replicas import create_replicas
from tests.dashboard.conftest import World, begin_rollout
from tests.fakes.world import NOW, make_deployment, make_node

FORM = {
    "reason": "faster",
    "max_surge": "1",
    "max_unavailable": "1",
    "canary": "1",
    "growth": "50%, 100%",
    "approve_waves": "2",
    "canary_soak_seconds": 0,
    "soak_seconds": 0,
    "min_requests": 0,
    "warm_up_seconds": 30,
    "max_error_percent": 2,
    "max_ttft_ratio": 1.5,
    "max_itl_ratio": 1.5,
    "on_failure": "roll_back",
    "sessions_wait_seconds": 10,
    "move_sessions": "on",
}


@pytest.fixture
def deployment(operator: Client) -> Deployment:  # noqa: ARG001 - opens the database
    make_node("gpu-7")
    made = make_deployment("talk", replicas=3)
    create_replicas(made.pk, 3, why="test", actor="test", now=NOW)
    return made


def text_of(answer: Any) -> str:
    return str(answer.content.decode())


def test_nothing_begins_before_its_plan_was_read(operator: Client, deployment: Deployment) -> None:
    address = reverse("rollout_new", args=[deployment.pk])
    assert "Show the plan" in text_of(operator.get(address))
    wish = FORM | {"model": str(deployment.model_id), "engine_options": "max_num_seqs = 5"}
    blind = operator.post(address, wish | {"step": "begin"})
    assert "nothing has been done yet" in text_of(blind)
    assert not Rollout.objects.exists()
    plan = blind.context["plan"]
    assert [len(wave.replica_ids) for wave in plan.waves] == [1, 1, 1]
    assert "waits for approval" in text_of(blind)
    other = operator.post(address, wish | {"step": "begin", "planned": plan.digest, "growth": "100%"})
    assert "Not done yet" in text_of(other)
    assert not Rollout.objects.exists()
    done = operator.post(address, wish | {"step": "begin", "planned": plan.digest})
    made = Rollout.objects.get()
    assert done["Location"] == reverse("rollout", args=[made.pk])
    assert (made.status, made.asked_by, made.to_release.engine_options) == (
        "running",
        "user:olga",
        {"max_num_seqs": 5},
    )


def test_form_begins_with_what_runs_and_its_fields_become_the_release(
    operator: Client, deployment: Deployment
) -> None:
    deployment.engine = "torch"
    deployment.engine_options = {"max_num_seqs": 5, "kv_pool": "private", "of_another_version": 3}
    deployment.save()
    address = reverse("rollout_new", args=[deployment.pk])
    page = operator.get(address)
    fields = {bound.name: bound.value() for group in page.context["options"].groups for bound in group.fields}
    assert (fields["max_num_seqs"], fields["kv_pool"]) == (5, "private")
    assert page.context["form"]["engine_options"].value() == "of_another_version = 3"
    wish = FORM | {"model": str(deployment.model_id), "o-max_num_seqs": "7", "o-kv_pool": ""}
    deployment.engine_options = {}
    deployment.save()
    plan = operator.post(address, wish).context["plan"]
    operator.post(address, wish | {"step": "begin", "planned": plan.digest})
    assert Rollout.objects.get().to_release.engine_options == {"max_num_seqs": 7}
    twice = text_of(operator.post(address, wish | {"engine_options": "max_num_seqs = 8"}))
    assert "max_num_seqs: said here and in a field below." in twice


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"o-max_num_seqs": "0"}, "greater than or equal to 1"),
        ({"max_surge": "0", "max_unavailable": "0"}, "allow one of them"),
        ({"max_surge": "many"}, "a share such as 25%"),
        ({"engine_options": "seed"}, "is not “name = value”"),
        ({"approve_waves": "two"}, "Give numbers of waves"),
        ({"reason": ""}, "This field is required"),
        ({"memory_mib": str(2**44)}, "less than or equal to 1073741824"),
    ],
)
def test_what_makes_no_sense_is_said_beside_its_field(
    operator: Client, deployment: Deployment, changes: dict[str, str], said: str
) -> None:
    wish = FORM | {"model": str(deployment.model_id), "engine_options": "max_num_seqs = 5"} | changes
    answer = operator.post(reverse("rollout_new", args=[deployment.pk]), wish)
    assert answer.status_code == 422
    assert said in text_of(answer)
    assert not Rollout.objects.exists()


def test_page_shows_waves_gates_and_only_the_buttons_that_apply(operator: Client, world: World) -> None:
    address = reverse("rollout", args=[world["rollout_id"]])
    rollout = Rollout.objects.get(pk=world["rollout_id"])
    wave = rollout.waves.get(number=1)
    replica = rollout.deployment.replica_set.get()
    WaveMember.objects.create(wave=wave, replica=replica)
    gates = judge(Answers(), Answers(), Health(1, 0, (f"{replica.name} is loading",)), RolloutPolicy())
    Wave.objects.filter(pk=wave.pk).update(status="moving", gates=[asdict(gate) for gate in gates])
    Rollout.objects.filter(pk=rollout.pk).update(waits_for=f"{replica.name} is loading")
    page = text_of(operator.get(address))
    assert f"Now: {replica.name} is loading" in page
    assert "0 of 1 on the new release (old)" in page
    assert "0 of 20 answers that a verdict needs" in page
    assert ("Pause…" in page, "Roll back…" in page, "Go on with…" in page) == (True, True, False)
    act = reverse("rollout_act", args=[rollout.pk])
    assert "say why" in text_of(operator.post(f"{act}?act=pause", follow=True))
    paused = text_of(operator.post(f"{act}?act=pause", {"reason": "lunch"}, follow=True))
    assert ("Pause…" in paused, "Go on with…" in paused) == (False, True)
    assert "lunch" in paused
    refused = text_of(operator.post(f"{act}?act=pause", {"reason": "again"}, follow=True))
    assert "Not done: it is paused" in refused
    progress = operator.get(reverse("rollout_progress", args=[rollout.pk]))
    assert "Waves" in text_of(progress)
    assert operator.get(reverse("rollout_figure", args=[rollout.pk])).json()["data"] == []


def test_second_person_approves_and_the_first_cannot(operator: Client, deployment: Deployment) -> None:
    rollout = begin_rollout(deployment)
    Rollout.objects.filter(pk=rollout.pk).update(status="planned")
    act = reverse("rollout_act", args=[rollout.pk]) + "?act=approve"
    assert "somebody else must approve it" in text_of(operator.post(act, {"reason": "me"}, follow=True))
    Rollout.objects.filter(pk=rollout.pk).update(asked_by="user:somebody")
    operator.post(act, {"reason": "read it"})
    rollout.refresh_from_db()
    assert (rollout.status, rollout.approved_by) == ("running", "user:olga")


def test_deployment_page_shows_its_releases_and_the_rollout(operator: Client, deployment: Deployment) -> None:
    rollout = begin_rollout(deployment)
    shown = text_of(operator.get(reverse("deployment_rollouts", args=[deployment.pk])))
    assert reverse("rollout", args=[rollout.pk]) in shown
    assert "max_num_seqs = 2" in shown
    assert "new replicas run it" in shown


def test_list_finds_rollouts_by_state_and_words(viewer: Client, world: World) -> None:
    address = reverse("rollouts")
    assert "chat" in text_of(viewer.get(address, {"state": "running"}))
    assert "Nothing matches" in text_of(viewer.get(address, {"state": "done"}))
    assert "Nothing matches" in text_of(viewer.get(address, {"q": "no such words"}))
    assert Rollout.objects.get(pk=world["rollout_id"]).get_status_display() == "running"


def test_cells_are_filled_by_what_runs_the_new_release() -> None:
    seats = [Seat("n1", NEW), Seat("n1", OLD), Seat("n2", NEW), Seat("n3", FAILED), Seat("n3", NEW)]
    found = [(cell.node_name, cell.done, cell.total, cell.height, cell.state) for cell in cells_of(seats)]
    assert found == [("n1", 1, 2, 10, OLD), ("n2", 1, 1, 20, NEW), ("n3", 1, 2, 10, FAILED)]


@pytest.mark.parametrize(
    ("is_kept", "rolls", "successor", "successor_kept", "state"),
    [
        (True, False, "", False, OLD),
        (True, True, "", False, UNDER_WAY),
        (True, True, "ready", True, UNDER_WAY),
        (False, True, "loading", True, UNDER_WAY),
        (False, True, "ready", True, NEW),
        (True, True, "failed", True, FAILED),
        (True, False, "stopped", False, OLD),
        (False, True, "stopped", False, "back"),
    ],
)
def test_state_of_a_member(
    is_kept: bool, rolls: bool, successor: str, successor_kept: bool, state: str
) -> None:
    told = state_of_member(is_kept=is_kept, rolls=rolls, successor=successor, successor_kept=successor_kept)
    assert told == state


def test_buttons_match_the_lifecycle_and_the_rights() -> None:
    everything = {"rollouts.change_rollout", "rollouts.approve_rollout"}
    for status in ROLLOUT.statuses:
        for button in buttons_of(status, everything):
            assert ROLLOUT.allows(status, button.act)
        assert buttons_of(status, set()) == ()
    assert {b.act for b in buttons_of("halted", everything)} == {"resume", "roll_back"}
    assert {b.act for b in buttons_of("planned", {"rollouts.approve_rollout"})} == {"approve"}


def test_figure_has_shares_of_each_release_over_seconds() -> None:
    figure = ttft_figure({"release 1 (old)": {10: 1, 12: 3}, "release 2 (new)": {}})
    [line] = figure["data"]
    assert (line["name"], line["y"]) == ("release 1 (old)", [0.25, 0.0, 0.75])
    assert line["x"] == sorted(line["x"])
