"""Rollouts over REST: planned, confirmed, acted on."""

from __future__ import annotations

from typing import Any

import pytest

from exaserve_ops.rollouts.models import Rollout
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.services.replicas import create_replicas
from tests.fakes.world import (
    NOW,
    JsonClient,
    client_with_key,
    make_deployment,
    make_model,
    make_node,
    make_user,
)

pytestmark = pytest.mark.django_db

ROLLOUTS = "/api/v1/rollouts"


@pytest.fixture
def deployment() -> Deployment:
    for name, rack in (("a", "r1"), ("b", "r2")):
        make_node(name, rack=rack)
    made = make_deployment("talk", replicas=4)
    create_replicas(made.pk, 4, why="test", actor="test", now=NOW)
    return made


@pytest.fixture
def operator() -> JsonClient:
    return client_with_key(make_user("operator", "operator"))


def wish_of(deployment: Deployment, **changes: Any) -> dict[str, Any]:
    return {"deployment": str(deployment.pk), "engine_options": {"max_num_seqs": 7}, **changes}


def test_plan_is_read_confirmed_and_carried_out(operator: JsonClient, deployment: Deployment) -> None:
    wish = wish_of(deployment, policy={"max_surge": "25%"})
    plan = operator.post(f"{ROLLOUTS}/plan", wish).json()
    assert (plan["old"]["number"], plan["new"]["number"], plan["surge"]) == (1, 2, 1)
    assert sum(len(wave["replica_ids"]) for wave in plan["waves"]) == 4
    assert plan["estimate"]["replicas"] == 4
    assert plan["estimate"]["seconds"] > 0
    assert plan["refusals"] == []
    assert deployment.releases.count() == 1, "a plan leaves nothing behind"
    assert operator.post(ROLLOUTS, wish | {"plan": plan["digest"]}).status_code == 400, "no reason"
    stale = operator.post(ROLLOUTS, wish | {"plan": "0" * 32, "reason": "try"})
    assert (stale.status_code, "read it again" in stale.json()["error"]["message"]) == (409, True)
    made = operator.post(ROLLOUTS, wish | {"plan": plan["digest"], "reason": "faster"})
    assert made.status_code == 201, made.json()
    body = made.json()
    assert (body["status"], body["from_number"], body["to_number"]) == ("running", 1, 2)
    assert [wave["number"] for wave in body["waves"]] == [wave["number"] for wave in plan["waves"]]
    assert operator.get(f"{ROLLOUTS}/{body['id']}").json() == body
    [listed] = operator.get(ROLLOUTS, {"deployment": str(deployment.pk)}).json()["results"]
    assert listed["id"] == body["id"]
    numbers = [one["number"] for one in operator.get("/api/v1/releases").json()["results"]]
    assert sorted(numbers) == [1, 2]


def test_zero_surge_and_zero_unavailable_are_refused_with_what_to_do(
    operator: JsonClient, deployment: Deployment
) -> None:
    wish = wish_of(deployment, policy={"max_surge": 0, "max_unavailable": 0})
    for address, body in ((f"{ROLLOUTS}/plan", wish), (ROLLOUTS, wish | {"plan": "x", "reason": "y"})):
        answer = operator.post(address, body)
        assert answer.status_code == 400
        [message] = answer.json()["error"]["fields"]["policy.max_surge"]
        assert "allow one of them" in message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy": {"max_surge": "-1"}}, "policy.max_surge"),
        ({"policy": {"max_surge": "101%"}}, "policy.max_surge"),
        ({"policy": {"canary": 0}}, "policy.canary"),
        ({"policy": {"growth": []}}, "policy.growth"),
        ({"policy": {"canary": "9" * 5000}}, "policy.canary"),
        ({"policy": {"max_surge": "9" * 5000 + "%"}}, "policy.max_surge"),
        ({"policy": {"max_unavailable": {"a": []}}}, "policy.max_unavailable"),
        ({"policy": {"growth": ["10%", "9" * 5000]}}, "policy.growth"),
        ({"policy": {"soak_seconds": True}}, "policy.soak_seconds"),
        ({"policy": {"max_ttft_ratio": 0.5}}, "policy.max_ttft_ratio"),
        ({"policy": {"on_failure": "shrug"}}, "policy.on_failure"),
        ({"policy": {"approve_waves": [0]}}, "policy.approve_waves"),
        ({"policy": {"speed": 1}}, "policy.speed"),
        ({"engine": "none-such"}, "engine"),
        ({"engine_options": {"api_key": "sk-1234567890abcdef1234"}}, "engine_options.api_key"),
        ({"model": "00000000-0000-4000-8000-000000000000"}, "model"),
        ({"depolyment": "x"}, "depolyment"),
    ],
)
def test_what_makes_no_sense_is_refused_by_field(
    operator: JsonClient, deployment: Deployment, changes: dict[str, Any], field: str
) -> None:
    answer = operator.post(f"{ROLLOUTS}/plan", wish_of(deployment, **changes))
    assert answer.status_code == 400
    assert list(answer.json()["error"]["fields"]) == [field]
    assert deployment.releases.count() == 1


def test_other_weights_under_a_shared_name_are_refused(operator: JsonClient, deployment: Deployment) -> None:
    twin = make_deployment("twin", replicas=1, model=deployment.model_id)
    wish = wish_of(deployment, model=str(make_model("other").pk), engine_options=None)
    plan = operator.post(f"{ROLLOUTS}/plan", wish).json()
    assert twin.name in plan["refusals"][0]
    answer = operator.post(ROLLOUTS, wish | {"plan": plan["digest"], "reason": "try"})
    assert answer.status_code == 409
    assert not Rollout.objects.exists()


def test_buttons_act_with_a_reason_and_only_where_they_apply(
    operator: JsonClient, deployment: Deployment
) -> None:
    wish = wish_of(deployment, policy={"second_approver": True})
    digest = operator.post(f"{ROLLOUTS}/plan", wish).json()["digest"]
    body = operator.post(ROLLOUTS, wish | {"plan": digest, "reason": "try"}).json()
    address = f"{ROLLOUTS}/{body['id']}"
    assert body["status"] == "planned"
    assert operator.post(f"{address}/approve", {"reason": "mine"}).status_code == 403
    other = client_with_key(make_user("second", "operator"))
    assert other.post(f"{address}/pause", {"reason": "x"}).status_code == 409
    assert other.post(f"{address}/approve", {}).status_code == 400
    assert other.post(f"{address}/approve", {"reason": "read it"}).json()["approved_by"] == "user:second"
    assert other.post(f"{address}/pause", {"reason": "lunch"}).json()["status"] == "paused"
    assert other.post(f"{address}/resume", {"reason": "back"}).json()["status"] == "running"
    turned = other.post(f"{address}/roll-back", {"reason": "no"}).json()
    assert (turned["status"], turned["why"]) == ("rolling_back", "no")
    assert other.post(f"{address}/cancel", {"reason": "x"}).status_code == 409
