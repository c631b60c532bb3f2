"""Validations over REST: asked for, read as a report, cancelled; bad wishes are told what to do."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

import pytest

from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.services.replicas import create_replicas
from exaserve_ops.validation.domain.asking import Finding
from exaserve_ops.validation.domain.lifecycle import FAILED, PASSED
from exaserve_ops.validation.models import Validation
from exaserve_ops.validation.selectors import subject_of_check
from exaserve_ops.validation.services import advance_validation, end_trial, make_trial, record_finding
from tests.fakes.world import NOW, JsonClient, client_with_key, make_model, make_node, make_user

pytestmark = pytest.mark.django_db

VALIDATIONS = "/api/v1/validations"


@pytest.fixture
def model() -> Model:
    make_node("gpu-1")
    return make_model()


@pytest.fixture
def operator() -> JsonClient:
    return client_with_key(make_user("operator", "operator"))


def wish_of(model: Model, **changes: Any) -> dict[str, Any]:
    return {"model": str(model.pk), "engines": ["torch"], "reason": "new weights", **changes}


def test_validation_is_asked_for_read_and_cancelled(operator: JsonClient, model: Model) -> None:
    made = operator.post(VALIDATIONS, wish_of(model, engines=["torch", "simulated"], idle_seconds=5))
    assert made.status_code == 201, made.json()
    body = made.json()
    assert (body["status"], body["engines"], body["asked_by"]) == (
        "queued",
        ["torch", "simulated"],
        "user:operator",
    )
    names = [(check["name"], check["engine"]) for check in body["checks"]]
    assert names[:2] == [("config", ""), ("weights", "")]
    assert names[-1] == ("agreement", "")
    assert all(check["asks"].endswith("?") for check in body["checks"])
    found = operator.get(f"{VALIDATIONS}/{body['id']}").json()
    assert found["checks"] == body["checks"]
    assert operator.post(f"{VALIDATIONS}/{body['id']}/cancel", {}).status_code == 400, "no reason"
    ended = operator.post(f"{VALIDATIONS}/{body['id']}/cancel", {"reason": "wrong model"}).json()
    assert (ended["status"], ended["why"]) == ("cancelled", "wrong model")
    assert {check["status"] for check in ended["checks"]} == {"skipped"}
    again = operator.post(f"{VALIDATIONS}/{body['id']}/cancel", {"reason": "x"})
    assert again.status_code == 409
    events = Event.objects.filter(subject_kind="validation").order_by("pk")
    assert list(events.values_list("event", flat=True)) == ["created", "cancel"]


def test_what_is_asked_of_it_is_what_the_report_says(operator: JsonClient, model: Model) -> None:
    asked = {
        "idle_seconds": 7,
        "most_at_once": 5,
        "most_launches": 2,
        "ttft_limit_seconds": 1.5,
        "itl_limit_seconds": 0.25,
        "replica_memory_bytes": 1 << 30,
        "engine_options": {"torch": {"max_num_seqs": 3}},
    }
    told = operator.post(VALIDATIONS, wish_of(model, **asked)).json()
    assert {name: told[name] for name in asked} == asked


def test_validation_over_several_nodes_is_taken_where_a_supernode_is_large_enough(
    operator: JsonClient, model: Model
) -> None:
    asked = {"nodes_per_replica": 2, "engine_options": {"torch": {"pipeline_stages": 2}}}
    make_node("apart", rack="r2", supernode="s2")
    make_node("one", rack="r3", supernode="s1")
    refused = operator.post(VALIDATIONS, wish_of(model, **asked))
    assert refused.status_code == 400
    assert "no supernode has more than 1" in str(refused.json()["error"])
    assert not Deployment.objects.exists(), "what was made to look is taken back"
    make_node("two", rack="r4", supernode="s1")
    few = operator.post(VALIDATIONS, wish_of(model, **asked, nodes=["one", "apart"]))
    assert few.status_code == 400
    made = operator.post(VALIDATIONS, wish_of(model, **asked))
    assert made.status_code == 201, made.json()
    assert made.json()["nodes_per_replica"] == 2
    validation = advance_validation(UUID(made.json()["id"]), "start", why="", actor="test", now=NOW)
    assert make_trial(validation, "torch", now=NOW).nodes_per_replica == 2
    assert "several nodes" in subject_of_check(validation, "torch").why_no_sleep


def test_what_a_deployment_is_refused_for_is_refused_before_anything_starts_for_the_engine_it_is_of(
    operator: JsonClient, model: Model
) -> None:
    node = make_node("with-vllm")
    node.engines, node.engine_versions = ["torch", "vllm"], {"vllm": "0.33.0"}
    node.save()
    wish = wish_of(model, engines=["torch", "vllm"], accelerators_per_replica=2)
    refused = operator.post(VALIDATIONS, wish)
    assert refused.status_code == 400, "vLLM runs on one accelerator unless it is told"
    assert "vllm: " in str(refused.json()["error"])
    assert "accelerators_per_replica" in str(refused.json()["error"])
    told = operator.post(VALIDATIONS, wish | {"engine_options": {"vllm": {"tensor_parallel_size": 2}}})
    assert told.status_code == 201, told.json()


def test_what_an_engine_is_tried_in_is_the_validations_alone(operator: JsonClient, model: Model) -> None:
    asked = operator.post(VALIDATIONS, wish_of(model)).json()
    validation = advance_validation(UUID(asked["id"]), "start", why="", actor="test", now=NOW)
    trial = make_trial(validation, "torch", now=NOW)
    address = f"/api/v1/deployments/{trial.pk}"
    [made] = create_replicas(trial.pk, 1, why="x", actor="test", now=NOW)
    rollout = {
        "deployment": str(trial.pk),
        "engine_options": {"max_num_seqs": 7},
        "reason": "x",
        "plan": "x",
    }
    for refused in (
        operator.patch(address, {"replicas": 5}),
        operator.patch(address, {"standbys_sleep": True, "generation": trial.generation}),
        operator.delete(address),
        operator.post(f"/api/v1/replicas/{made.pk}/restart", {"reason": "x"}),
        operator.post(f"/api/v1/replicas/{made.pk}/replace", {"reason": "x"}),
        operator.post("/api/v1/rollouts", rollout),
    ):
        assert refused.status_code == 409
        assert "cancel the validation" in refused.json()["error"]["message"]
    trial.refresh_from_db()
    assert (trial.replicas, trial.status) == (1, "active")
    end_trial(validation, now=NOW)
    trial.refresh_from_db()
    assert trial.status == "deleting"


def test_one_at_a_time_of_a_model_on_an_engine(operator: JsonClient, model: Model) -> None:
    assert operator.post(VALIDATIONS, wish_of(model)).status_code == 201
    refused = operator.post(VALIDATIONS, wish_of(model))
    assert refused.status_code == 409
    assert re.search(
        r"validation [0-9a-f-]{36} of .* has not ended: wait for it, or cancel it",
        refused.json()["error"]["message"],
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"engines": []}, "engines"),
        ({"engines": ["none such"]}, "engine"),
        ({"engine_options": {"vllm": {}}}, "engine_options"),
        ({"engine_options": {"torch": {"x": [1]}}}, "engine_options.x"),
        ({"idle_seconds": 999_999}, "idle_seconds"),
        ({"most_at_once": 0}, "most_at_once"),
        ({"most_at_once": 257}, "most_at_once"),
        ({"nodes_per_replica": 2}, "nodes_per_replica"),
        ({"nodes_per_replica": 65}, "nodes_per_replica"),
        ({"most_launches": 25}, "most_launches"),
        ({"ttft_limit_seconds": 0}, "ttft_limit_seconds"),
        ({"nodes": ["no such node"]}, "nodes"),
        ({"model": "00000000-0000-0000-0000-000000000000"}, "model"),
        ({"reason": " "}, "reason"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_bad_wish_names_its_field_and_leaves_nothing(
    operator: JsonClient, model: Model, change: dict[str, Any], field: str
) -> None:
    refused = operator.post(VALIDATIONS, wish_of(model) | change)
    assert refused.status_code == 400, refused.json()
    assert field in str(refused.json()["error"])
    assert not Validation.objects.exists()


def test_report_filters_by_state_model_and_engine(operator: JsonClient, model: Model) -> None:
    made = operator.post(VALIDATIONS, wish_of(model)).json()
    validation = Validation.objects.get(pk=made["id"])
    advance_validation(validation.pk, "start", why="", actor="test", now=NOW)
    details = {"levels": [{"at_once": 1, "tokens_per_second": 10.0}]}
    record_finding(validation, 1, Finding(PASSED, "fine", why="as it should be"), now=NOW)
    record_finding(validation, 2, Finding(FAILED, why="no manifest", details=details), now=NOW)
    assert operator.get(f"{VALIDATIONS}?engine=torch&status=running").json()["count"] == 1
    assert operator.get(f"{VALIDATIONS}?engine=vllm").json()["count"] == 0
    assert operator.get(f"{VALIDATIONS}?model={model.pk}").json()["count"] == 1
    checks = operator.get(f"{VALIDATIONS}/{made['id']}").json()["checks"]
    assert [check["status"] for check in checks[:2]] == ["passed", "failed"]
    assert checks[1]["details"] == details
    told = Event.objects.get(event="check_failed")
    assert told.reason == "Weights: no manifest"


def test_sizes_that_the_model_cannot_be_divided_by_are_refused_before_anything_is_tried(
    operator: JsonClient, model: Model
) -> None:
    Node.objects.update(engines=["vllm"])
    options = {"vllm": {"tensor_parallel_size": 3}}
    wish = wish_of(model, engines=["vllm"], engine_options=options, accelerators_per_replica=3)
    refused = operator.post(VALIDATIONS, wish)
    assert refused.status_code == 400
    assert "give 1, 2 or 4" in refused.content.decode()
    assert not Validation.objects.exists()
