"""Pages of deployments: create, scale and delete, each with its plan first."""

from __future__ import annotations

import re
from typing import Any

from django.test import Client
from django.urls import reverse

from exaserve_ops.audit.models import Event
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment, update_deployment
from exaserve_ops.serving.services.replicas import create_replicas
from tests.dashboard.conftest import World, addresses
from tests.fakes.world import GIB, NOW, make_deployment, make_model, make_node


def test_deployments_that_share_a_name_point_to_each_other(operator: Client, world: World) -> None:
    assert "Shares its name" not in operator.get(addresses(world)["deployment"]).content.decode()
    first = Deployment.objects.get()
    twin = make_deployment("twin", model=first.model_id)
    assert twin.served_name == first.served_name
    page = operator.get(addresses(world)["deployment"]).content.decode()
    assert "Shares its name" in page
    assert f"/deployments/{twin.pk}" in page
    assert "requests go to the replicas of both" in page
    make_deployment("third", model=first.model_id)
    page = operator.get(addresses(world)["deployment"]).content.decode()
    assert "requests go to the replicas of all" in page


def test_a_large_deployment_is_shown_by_pages_and_searched_on_the_server(operator: Client) -> None:
    deployment = make_deployment("large", replicas=120)
    made = create_replicas(deployment.pk, 120, why="120 of 120", actor="test", now=NOW)
    make_deployment("other")
    address = reverse("deployment", args=[deployment.pk])
    first = operator.get(address).content.decode()
    assert first.count('id="replica-') == 50
    assert "1\u201350 of 120" in first
    last = operator.get(address, {"page": 3}).content.decode()
    assert "101\u2013120 of 120" in last
    sought = max(replica.name for replica in made)
    assert sought not in first
    found = operator.get(address, {"q": sought}).content.decode()
    assert found.count('id="replica-') == 1
    assert sought in found
    stopped = operator.get(address, {"state": "stopped"}).content.decode()
    assert "No replica of this deployment has what the filters ask for" in stopped


def test_a_name_that_another_model_serves_is_refused_beside_the_field(operator: Client, world: World) -> None:
    taken = Deployment.objects.get().served_name
    form = {
        "name": "other",
        "model": str(make_model("other").pk),
        "served_name": taken,
        "replicas": 1,
        "engine": "torch",
        "accelerators_per_replica": 1,
        "drain_seconds": 60,
        "start_seconds": 300,
        "step": "plan",
    }
    answer = operator.post(reverse("deployment_new"), form)
    assert answer.status_code == 422
    page = answer.content.decode()
    assert "serves &#x27;" in page
    assert "Give another served name" in page
    assert world["deployment_id"] == Deployment.objects.get().pk


def test_scaling_shows_its_plan_and_changes_nothing_until_confirmed(operator: Client, world: World) -> None:
    address = addresses(world)["deployment_scale"]
    page = operator.get(address, {"replicas": 5}).content.decode()
    assert "new replica 1" in page
    assert "on gpu-1" in page
    assert Deployment.objects.get().replicas == 2
    generation = re.search(r'name="generation" value="(\d+)"', page)
    assert generation is not None
    answer = operator.post(address, {"replicas": 5, "generation": generation[1], "reason": "evening peak"})
    assert answer.status_code == 302
    assert Deployment.objects.get().replicas == 5
    event = Event.objects.get(event="scaled")
    assert event.actor == "user:olga"
    assert "evening peak" in event.reason


def test_a_plan_that_somebody_overtook_is_refused_with_a_fresh_one(operator: Client, world: World) -> None:
    Deployment.objects.update(generation=9, replicas=3)
    address = addresses(world)["deployment_scale"]
    answer = operator.post(address, {"replicas": 5, "generation": 1, "reason": ""})
    assert answer.status_code == 409
    assert "at generation 9, not 1" in answer.content.decode()
    assert 'name="generation" value="9"' in answer.content.decode()
    assert Deployment.objects.get().replicas == 3


def test_deleting_needs_a_reason_and_keeps_the_history(operator: Client, world: World) -> None:
    address = addresses(world)["deployment_delete"]
    operator.post(address, {"generation": 1, "reason": ""})
    assert Deployment.objects.get().status == "active"
    operator.post(address, {"generation": 1, "reason": "replaced by v2"})
    assert Deployment.objects.get().status == "deleting"
    assert operator.get(addresses(world)["deployment"]).status_code == 200


def test_creating_a_deployment_reads_options_and_names_what_is_wrong(operator: Client) -> None:
    model = make_model()
    make_node("gpu-1")
    form = {
        "name": "chat",
        "model": str(model.pk),
        "replicas": 2,
        "engine": "torch",
        "engine_options": "num_blocks = 512\nkv_pool = private",
        "accelerators_per_replica": 1,
        "drain_seconds": 60,
        "start_seconds": 300,
        "nodes": ["gpu-1"],
    }
    wrong = operator.post(reverse("deployment_new"), form | {"engine_options": "kv_blocks 512"})
    assert wrong.status_code == 422
    assert "is not “name = value”" in wrong.content.decode()
    create_as_planned(operator, form)
    made = Deployment.objects.get()
    assert made.engine_options == {"num_blocks": 512, "kv_pool": "private"}
    assert made.placement == {"nodes": ["gpu-1"]}
    assert operator.post(reverse("deployment_new"), form).status_code == 422


def create_as_planned(operator: Client, form: dict[str, Any]) -> None:
    """Ask for the plan, and confirm it."""
    page = operator.post(reverse("deployment_new"), form | {"step": "plan"})
    assert page.status_code == 200, page.content.decode()
    planned = re.search(r'name="planned" value="(\w+)"', page.content.decode())
    assert planned is not None
    confirmed = operator.post(reverse("deployment_new"), form | {"step": "create", "planned": planned[1]})
    assert confirmed.status_code == 302


def test_a_new_deployment_shows_where_its_replicas_go_before_it_exists(operator: Client) -> None:
    model = make_model()
    make_node("gpu-1", accelerators=1)
    form = {
        "name": "chat",
        "model": str(model.pk),
        "replicas": 2,
        "engine": "torch",
        "memory_mib": 5000,
        "accelerators_per_replica": 1,
        "drain_seconds": 60,
        "start_seconds": 300,
    }
    page = operator.post(reverse("deployment_new"), form | {"step": "plan"}).content.decode()
    assert "on gpu-1" in page
    assert "fits nowhere" in page
    assert not Deployment.objects.exists()
    assert not Event.objects.filter(subject_kind="deployment").exists()
    # What is confirmed is what was read: another form gets its own plan first.
    planned = re.search(r'name="planned" value="(\w+)"', page)
    assert planned is not None
    changed = form | {"replicas": 3, "step": "create", "planned": planned[1]}
    page = operator.post(reverse("deployment_new"), changed).content.decode()
    assert "new replica 3" in page
    assert "what you confirm must be what you read" in page
    assert not Deployment.objects.exists()
    create_as_planned(operator, form)
    assert Deployment.objects.get().replicas == 2


def test_the_name_that_clients_will_ask_for_is_said_before_it_is_made(operator: Client, world: World) -> None:  # noqa: ARG001 - an engine
    model = make_model("llama-small")
    form = {
        "name": "small",
        "model": str(model.pk),
        "served_name": "",
        "replicas": 1,
        "engine": "torch",
        "accelerators_per_replica": 1,
        "drain_seconds": 60,
        "start_seconds": 300,
        "step": "plan",
    }
    blank = operator.get(reverse("deployment_new")).content.decode()
    assert "Empty: the name of the model chosen above." in blank
    assert 'data-empty-is="id_model"' in blank
    asked = operator.post(reverse("deployment_new"), form).content.decode()
    assert re.search(r"Clients will ask for it by the model name <b[^>]*>llama-small</b>", asked)
    named = operator.post(reverse("deployment_new"), {**form, "served_name": "chat-1"}).content.decode()
    assert re.search(r"by the model name <b[^>]*>chat-1</b>", named)
    assert "It joins others" not in named
    others = [make_deployment(name, model=model.pk) for name in ("first", "second")]
    joins = operator.post(reverse("deployment_new"), form).content.decode()
    warning = joins.partition("It joins others that serve.")[2].partition("</div>")[0]
    assert re.findall(r'href="/deployments/([^"]+)"', warning) == [str(other.pk) for other in others]
    assert "give it a served name of its own" in warning


def test_what_was_asked_for_and_changed_stands_in_the_history_in_words(operator: Client) -> None:
    wish = DeploymentWish(
        name="wide",
        model_id=make_model("wide-model").pk,
        replicas=1,
        engine="torch",
        engine_options={"pipeline_stages": 2},
        replica_memory_bytes=GIB,
        nodes_per_replica=2,
        accelerator="whole",
    )
    made = create_deployment(wish, actor="test", now=NOW)
    update_deployment(made.pk, {"drain_slow": True}, actor="test", now=NOW)
    Deployment.objects.filter(pk=made.pk).update(engine_options={"enable_sleep_mode": True})
    page = operator.get(reverse("deployment", args=[made.pk])).content.decode()
    assert "1 replica of wide-model, each on 2 nodes, on whole accelerators" in page
    assert "drain_slow off to on" in page
    assert re.search(r"<dt>enable_sleep_mode</dt><dd[^>]*>on</dd>", page)
