"""Deployments over REST: intent, optimistic concurrency, dry runs."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.services.deployments import advance_deployment
from exaserve_ops.serving.services.replicas import create_replicas
from tests.fakes.world import NOW, JsonClient, make_deployment, make_model, make_node

pytestmark = pytest.mark.django_db


def url(deployment: Deployment, action: str = "") -> str:
    return f"/api/v1/deployments/{deployment.pk}" + (f"/{action}" if action else "")


def wish(**changes: object) -> dict[str, object]:
    return {"name": "chat", "model": str(make_model().pk), "replicas": 2, "engine": "torch"} | changes


def test_new_deployment_is_recorded_with_its_maker_and_an_etag(operator: JsonClient) -> None:
    make_node("n1")
    answer = operator.post(
        "/api/v1/deployments", wish(nodes=["n1"], engine_options={"num_blocks": 4, "kv_pool": "private"})
    )
    assert answer.status_code == 201, answer.json()
    body = answer.json()
    assert answer["ETag"] == '"1"'
    assert (body["replicas"], body["status"], body["nodes"]) == (2, "active", ["n1"])
    assert body["engine_options"] == {"num_blocks": 4, "kv_pool": "private"}
    assert Event.objects.get(subject_id=body["id"]).actor.startswith("user:operator-")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"replicas": -1}, "replicas"),
        ({"replicas": "many"}, "replicas"),
        ({"replicas": 10**9}, "replicas"),
        ({"name": "no spaces please"}, "name"),
        ({"name": "nul\u0000"}, "name"),
        ({"model": "00000000-0000-4000-8000-000000000000"}, "model"),
        ({"engine_options": {"a": {"nested": 1}}}, "engine_options"),
        ({"engine_options": {"a\u0000": "b"}}, "engine_options"),
        ({"engine_options": {"a": "b\u0000"}}, "engine_options"),
        ({"replica": 4}, "replica"),
        ({"accelerators_per_replica": 0}, "accelerators_per_replica"),
        ({"engine_options": {"pipeline_stages": 2}}, "nodes_per_replica"),
        ({"engine_options": {"pipeline_stages": 2}, "accelerators_per_replica": 2}, "nodes_per_replica"),
        (
            {"engine_options": {"pipeline_stages": 2, "kv_host_bytes": 1 << 20}, "nodes_per_replica": 2},
            "engine_options.kv_host_bytes",
        ),
    ],
)
def test_bad_wish_is_refused_with_the_field_that_is_wrong(
    operator: JsonClient, changes: dict[str, object], field: str
) -> None:
    answer = operator.post("/api/v1/deployments", wish(**changes))
    assert answer.status_code == 400, answer.json()
    assert field in answer.json()["error"]["fields"]
    assert not Deployment.objects.exists()


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({}, 1_500_000),
        ({"nodes_per_replica": 2, "engine_options": {"pipeline_stages": 2}}, 1 << 20),
        ({"engine": "simulated"}, 1 << 20),
    ],
)
def test_memory_that_nothing_starts_with_is_refused_with_the_least(
    operator: JsonClient, changes: dict[str, object], least: int
) -> None:
    asked = wish(**changes)
    Model.objects.filter(pk=asked["model"]).update(weights_bytes=3_000_000)
    for too_little in (1, least - 1):
        refused = operator.post("/api/v1/deployments", asked | {"replica_memory_bytes": too_little})
        assert refused.status_code == 400
        told = refused.json()["error"]["fields"]["replica_memory_bytes"][0]
        assert told.startswith(f"give at least {least:,} bytes")
        assert told.endswith("or 0 to have it computed")
    assert operator.post("/api/v1/deployments", asked | {"replica_memory_bytes": least}).status_code == 201


def test_memory_of_a_release_is_held_against_the_same_least(
    operator: JsonClient, deployment: Deployment
) -> None:
    Model.objects.filter(pk=deployment.model_id).update(weights_bytes=3_000_000)
    body = {"deployment": str(deployment.pk), "replica_memory_bytes": 1}
    refused = operator.post("/api/v1/rollouts/plan", body)
    assert refused.status_code == 400
    assert "1,500,000" in refused.json()["error"]["fields"]["replica_memory_bytes"][0]


def test_name_of_a_living_deployment_is_taken(operator: JsonClient, deployment: Deployment) -> None:
    answer = operator.post("/api/v1/deployments", wish(name=deployment.name))
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "conflict"


def test_stale_etag_changes_nothing(operator: JsonClient, deployment: Deployment) -> None:
    etag = operator.get(url(deployment))["ETag"]
    first = operator.patch(url(deployment), {"replicas": 4}, HTTP_IF_MATCH=etag)
    assert (first.status_code, first["ETag"]) == (200, '"2"')
    second = operator.patch(url(deployment), {"replicas": 9}, HTTP_IF_MATCH=etag)
    assert (second.status_code, second.json()["error"]["code"]) == (412, "precondition_failed")
    in_body = operator.patch(url(deployment), {"replicas": 9, "generation": 1})
    assert in_body.status_code == 409
    deleted = operator.delete(url(deployment), HTTP_IF_MATCH=etag)
    assert deleted.status_code == 412
    deployment.refresh_from_db()
    assert (deployment.replicas, deployment.generation, deployment.status) == (4, 2, "active")


@pytest.mark.parametrize("tag", ['"2"', "2", '"abc"', '"1", "2"', '"99999999999999999999"'])
def test_tag_that_is_not_the_present_one_is_a_failed_precondition(
    operator: JsonClient, deployment: Deployment, tag: str
) -> None:
    assert operator.patch(url(deployment), {"replicas": 4}, HTTP_IF_MATCH=tag).status_code == 412


def test_replicas_alone_need_no_generation_but_the_rest_does(
    operator: JsonClient, deployment: Deployment
) -> None:
    make_node("a")
    assert operator.patch(url(deployment), {"replicas": 3}).status_code == 200
    assert operator.patch(url(deployment), {"drain_seconds": 5}).status_code == 428
    answer = operator.patch(url(deployment), {"drain_seconds": 5, "nodes": ["a"], "generation": 2})
    assert answer.status_code == 200, answer.json()
    assert (answer.json()["drain_seconds"], answer.json()["nodes"]) == (5, ["a"])


def test_nodes_that_there_are_not_are_refused_by_name(operator: JsonClient, deployment: Deployment) -> None:
    made = operator.post("/api/v1/deployments", wish(nodes=["n1", "n2"]))
    changed = operator.patch(url(deployment), {"nodes": ["n3"], "generation": 1})
    assert (made.status_code, changed.status_code) == (400, 400)
    assert "no node is called 'n1', 'n2'" in made.content.decode()
    assert "no node is called 'n3'" in changed.content.decode()


def test_header_and_body_that_disagree_are_refused(operator: JsonClient, deployment: Deployment) -> None:
    change = {"replicas": 3, "generation": 2}
    assert operator.patch(url(deployment), change, HTTP_IF_MATCH='"1"').status_code == 400


def test_empty_change_is_refused(operator: JsonClient, deployment: Deployment) -> None:
    assert operator.patch(url(deployment), {}).status_code == 400
    assert operator.patch(url(deployment), {"engine": "x"}).status_code == 400


def test_deleting_is_accepted_twice_and_then_refuses_changes(
    operator: JsonClient, deployment: Deployment
) -> None:
    first = operator.delete(url(deployment))
    assert (first.status_code, first.json()["status"]) == (202, "deleting")
    assert operator.delete(url(deployment)).json()["generation"] == first.json()["generation"]
    assert operator.patch(url(deployment), {"replicas": 3}).status_code == 409


def test_deleted_deployment_leaves_the_list_but_not_the_record(
    operator: JsonClient, deployment: Deployment
) -> None:
    operator.delete(url(deployment))
    advance_deployment(deployment.pk, "emptied", actor="test", now=NOW)
    assert operator.get("/api/v1/deployments").json()["count"] == 0
    assert operator.get("/api/v1/deployments?ended=true").json()["count"] == 1
    assert operator.get("/api/v1/deployments?status=deleted").json()["count"] == 1
    assert operator.get(url(deployment)).json()["status"] == "deleted"
    assert operator.post(url(deployment, "plan"), {"replicas": 1}).status_code == 409


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"nodes_per_replica": 2}, "a new deployment"),
        ({"served_name": "other"}, "a new deployment"),
        ({"engine_options": {"max_num_seqs": 2}}, "a rollout"),
        ({"replicass": 2}, "no such field"),
    ],
)
def test_what_a_change_does_not_reach_says_what_does(
    operator: JsonClient, deployment: Deployment, change: dict[str, Any], told: str
) -> None:
    refused = operator.patch(url(deployment), change)
    assert refused.status_code == 400
    assert told in str(refused.json()["error"]["fields"])


@pytest.mark.usefixtures("node")
def test_plan_explains_its_steps_and_changes_nothing(viewer: JsonClient, deployment: Deployment) -> None:
    plan = viewer.post(url(deployment, "plan"), {"replicas": 3})
    assert plan.status_code == 200, plan.json()
    [step] = plan.json()["steps"]
    assert (step["action"], step["count"]) == ("create", 3)
    assert step["why"]
    deployment.refresh_from_db()
    assert (deployment.replicas, deployment.generation) == (2, 1)
    assert not deployment.replica_set.exists()


def test_plan_names_who_would_go_and_where_the_rest_would_run(
    viewer: JsonClient, deployment: Deployment, node: Node
) -> None:
    replicas = create_replicas(deployment.pk, 3, why="test", actor="test", now=NOW)
    steps = viewer.post(url(deployment, "plan"), {"replicas": 2}).json()["steps"]
    assert [s["action"] for s in steps] == ["cancel", "place", "place"]
    assert {s["replica"] for s in steps} == {str(r.pk) for r in replicas}
    assert {s.get("node_name") for s in steps} == {None, node.name}
    assert all(s["why"] for s in steps)


def test_lists_are_filtered_ordered_and_paged(viewer: JsonClient) -> None:
    model = make_model().pk
    for name in ("a", "b", "c"):
        make_deployment(name, model=model)
    first = viewer.get("/api/v1/deployments?ordering=-name&page_size=2").json()
    assert [d["name"] for d in first["results"]] == ["c", "b"]
    assert viewer.get(first["next"]).json()["results"][0]["name"] == "a"
    assert viewer.get("/api/v1/deployments?name=b").json()["count"] == 1
    assert viewer.get(f"/api/v1/deployments?model={uuid4()}").json()["count"] == 0
    bad = viewer.get("/api/v1/deployments?status=nonsense")
    assert (bad.status_code, list(bad.json()["error"]["fields"])) == (400, ["status"])
