"""Imports over REST: asked for, watched, tried again, given up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.models import ModelImport
from exaserve_ops.weights.models import NodeStore
from tests.api.conftest import JsonClient
from tests.fakes.world import make_model

pytestmark = pytest.mark.django_db
WISH = {
    "name": "big",
    "kind": "hub",
    "location": "https://hub.example/o/n",
    "revision": "v1.0",
    "secret": "hub-token",
    "files": ["*.safetensors", "*.json"],
    "reason": "for chat",
}


@pytest.fixture
def able(node: Node) -> Node:
    """A node whose store works."""
    NodeStore.objects.create(node=node, disk_total_bytes=1000, disk_free_bytes=900)
    return node


def test_a_model_is_asked_for_and_shown_with_how_it_goes(
    operator: JsonClient, viewer: JsonClient, able: Node
) -> None:
    made = operator.post("/api/v1/imports", WISH)
    assert made.status_code == 201, made.json()
    body = viewer.get(f"/api/v1/imports/{made.json()['id']}").json()
    assert {key: body[key] for key in WISH} == WISH
    assert (body["status"], body["attempt"], body["model"]) == ("waiting", 1, None)
    assert (body["node"], body["node_name"]) == (str(able.pk), able.name)
    [listed] = viewer.get("/api/v1/imports?status=waiting").json()["results"]
    assert listed == body
    assert viewer.get("/api/v1/imports?status=failed").json()["results"] == []


def test_an_import_is_given_up_and_only_a_failed_one_is_tried_again(operator: JsonClient, able: Node) -> None:
    address = (
        f"/api/v1/imports/{operator.post('/api/v1/imports', WISH | {'node': str(able.pk)}).json()['id']}"
    )
    assert operator.post(f"{address}/retry", {"reason": "now"}).status_code == 409
    ModelImport.objects.update(status="failed")
    again = operator.post(f"{address}/retry", {"reason": "I was let in"}).json()
    assert (again["status"], again["attempt"]) == ("waiting", 2)
    assert operator.post(f"{address}/cancel", {}).status_code == 400
    gone = operator.post(f"{address}/cancel", {"reason": "not needed"}).json()
    assert (gone["status"], gone["ended_at"] is None) == ("cancelled", False)
    assert operator.post(f"{address}/cancel", {"reason": "not needed"}).status_code == 409


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "folder"}, "kind"),
        ({"location": "ftp://hub/x"}, "location"),
        ({"location": "http://169.254.169.254/latest/meta-data"}, "location"),
        ({"location": "https://u:p@hub.example/o/n"}, "location"),
        ({"revision": "a b"}, "revision"),
        ({"kind": "s3", "location": "s3://b/p"}, "revision"),
        ({"secret": "../x"}, "secret"),
        ({"secret": "\u00e9"}, "secret"),
        ({"location": "https://hub.example/a/b/c/d"}, "location"),
        ({"location": "https://hub.example/only"}, "location"),
        ({"location": "https://localhost%00.com/o/n"}, "location"),
        ({"location": "https://\u24d7ub.example/o/n"}, "location"),
        ({"files": ["a b"]}, "files"),
        ({"node": "00000000-0000-4000-8000-000000000000"}, "node"),
        ({"token": "x"}, "token"),
    ],
)
def test_what_no_node_should_do_is_refused_by_field(
    operator: JsonClient, able: Node, settings: Any, change: dict[str, Any], field: str
) -> None:
    settings.ENV = dataclasses.replace(settings.ENV, allow_local_addresses=False)
    answer = operator.post("/api/v1/imports", WISH | change)
    assert answer.status_code == 400, answer.json()
    assert field in str(answer.json())
    assert able.model_imports.count() == 0


def test_names_that_are_taken_and_fleets_that_cannot_are_conflicts(operator: JsonClient, node: Node) -> None:
    assert "no node" in str(operator.post("/api/v1/imports", WISH).json())
    NodeStore.objects.create(node=node, disk_total_bytes=1000, problem="the disk is read-only")
    assert operator.post("/api/v1/imports", WISH | {"node": str(node.pk)}).status_code == 409
    NodeStore.objects.update(problem="")
    make_model("big")
    assert "registered already" in str(operator.post("/api/v1/imports", WISH).json())
    assert operator.post("/api/v1/imports", WISH | {"name": "other"}).status_code == 201
    assert "imported already" in str(operator.post("/api/v1/imports", WISH | {"name": "other"}).json())
