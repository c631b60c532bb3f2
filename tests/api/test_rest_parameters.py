"""What lists are asked for: parameters that do not exist, and what is left out unless asked for."""

from __future__ import annotations

import pytest

from exaserve_ops.api.views.base import OpsViewSet
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.routing.selectors import served_models
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment, update_deployment
from tests.fakes.routes import all_routes
from tests.fakes.world import NOW, JsonClient, make_deployment, make_model, make_node

LISTS = (
    "nodes", "nodes/join-tokens", "nodes/installations", "nodes/host-keys", "accelerators", "models",
    "deployments", "replicas", "sessions", "incidents", "events", "keys",
)  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_a_filter_that_does_not_exist_is_refused_with_those_that_do(operator: JsonClient, name: str) -> None:
    assert operator.get(f"/api/v1/{name}", {"page_size": 2}).status_code == 200
    answer = operator.get(f"/api/v1/{name}", {"livenes": "dead"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid"
    assert "There are: " in error["fields"]["livenes"][0]
    assert "page_size" in error["fields"]["livenes"][0]


READS = [
    route
    for route in all_routes()
    if issubclass(getattr(route.view, "cls", object), OpsViewSet)
    and "get" in getattr(route.view, "actions", {})
]


def test_nothing_that_is_read_takes_a_parameter_that_does_not_exist(operator: JsonClient) -> None:
    """Of lists, of single objects and of what is computed: whoever asks for less must not be shown all."""
    assert len(READS) > 30
    silent = {}
    for route in READS:
        answer = operator.get(f"{route.path}?livenes=dead")
        told = answer.json().get("error", {}).get("fields", {}).get("livenes", [""])[0]
        if answer.status_code != 400 or "There is no such filter. There are" not in told:
            silent[str(route)] = (answer.status_code, told)
    assert not silent


def test_an_order_that_does_not_exist_is_refused_with_those_that_do(operator: JsonClient) -> None:
    assert operator.get("/api/v1/nodes?ordering=-name,liveness").status_code == 200
    answer = operator.get("/api/v1/nodes?ordering=-name,boot_id")
    assert answer.status_code == 400
    said = answer.json()["error"]["fields"]["ordering"][0]
    assert said.startswith("Not by boot_id.")
    assert "last_report_at" in said
    assert operator.get("/api/v1/events?ordering=at").status_code == 400, "the cursor orders"


def test_retired_nodes_are_listed_only_when_asked_for(operator: JsonClient) -> None:
    make_node("here")
    gone = make_node("gone")
    Node.objects.filter(pk=gone.pk).update(liveness="retired")

    def names(query: str) -> set[str]:
        return {row["name"] for row in operator.get(f"/api/v1/nodes{query}").json()["results"]}

    assert names("") == {"here"}
    assert names("?retired=true") == {"here", "gone"}
    assert names("?liveness=retired") == {"gone"}
    assert operator.get(f"/api/v1/nodes/{gone.pk}").status_code == 200


def test_two_models_never_answer_to_one_name(operator: JsonClient) -> None:
    first = make_deployment("first")
    other = make_model("other")
    body = {"name": "second", "model": str(other.pk), "replicas": 1, "engine": "torch"}
    taken = operator.post("/api/v1/deployments", body | {"served_name": first.served_name})
    assert taken.status_code == 400
    assert "deployment 'first' serves" in taken.json()["error"]["fields"]["served_name"][0]
    assert operator.post("/api/v1/deployments", body).status_code == 201
    # The same bytes may have two deployments: one on each kind of machine, for instance.
    same = body | {"name": "third", "model": str(first.model_id), "served_name": first.served_name}
    made = operator.post("/api/v1/deployments", same)
    assert made.status_code == 201
    Deployment.objects.filter(served_name=first.served_name).update(status="deleting")
    wish = DeploymentWish("fourth", other.pk, 1, "torch", served_name=first.served_name)
    assert create_deployment(wish, actor="test", now=NOW).served_name == first.served_name


@pytest.mark.usefixtures("db")
def test_clients_are_told_of_models_only_while_replicas_are_wanted() -> None:
    deployment = make_deployment("chat", replicas=2)
    assert served_models() == {deployment.served_name}
    update_deployment(deployment.pk, {"replicas": 0}, actor="test", now=NOW)
    assert served_models() == frozenset()


@pytest.mark.usefixtures("db")
def test_a_name_that_another_model_serves_is_refused_before_anything_is_written() -> None:
    first = make_deployment("first")
    wish = DeploymentWish("second", make_model("other").pk, 1, "torch", served_name=first.served_name)
    with pytest.raises(InvalidInputError, match="by chance"):
        create_deployment(wish, actor="test", now=NOW)
    assert Deployment.objects.count() == 1
