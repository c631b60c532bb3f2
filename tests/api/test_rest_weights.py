"""Weights over REST: who has them, who is to have them, when they are fetched ahead, from where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.models import Model
from exaserve_ops.weights.domain.held import HeldWeights, StoreSight
from exaserve_ops.weights.models import WeightsClaim
from exaserve_ops.weights.services import record_sight
from tests.api.conftest import JsonClient
from tests.fakes.world import NOW, make_model

pytestmark = pytest.mark.django_db


@pytest.fixture
def address(operator: JsonClient, model_folder: Path) -> str:
    made = operator.post("/api/v1/models", {"name": "tiny", "folder": str(model_folder)}).json()
    return f"/api/v1/models/{made['id']}"


def row(client: JsonClient, address: str) -> dict[str, Any]:
    [found] = client.get(f"{address}/weights").json()["nodes"]
    return dict(found)


def test_weights_are_asked_for_paused_and_given_back_by_hand(
    operator: JsonClient, viewer: JsonClient, node: Node, address: str
) -> None:
    wish = {"nodes": [str(node.pk)], "reason": "launch"}
    assert row(viewer, address)["state"] == "absent"
    answer = operator.post(f"{address}/weights", wish | {"action": "want", "bytes_per_second": 5_000_000})
    assert answer.status_code == 200, answer.json()
    assert (row(viewer, address)["owners"], row(viewer, address)["paused"]) == (["person"], False)
    operator.post(f"{address}/weights", wish | {"action": "pause"})
    assert row(viewer, address)["paused"]
    operator.post(f"{address}/weights", wish | {"action": "resume"})
    assert not row(viewer, address)["paused"]
    operator.post(f"{address}/weights", wish | {"action": "release"})
    assert not WeightsClaim.objects.exists()
    assert operator.post(f"{address}/weights", wish | {"action": "steal"}).status_code == 400
    crawl = wish | {"action": "want", "bytes_per_second": 1000}
    assert operator.post(f"{address}/weights", crawl).status_code == 400
    unknown = operator.post(f"{address}/weights", wish | {"action": "want", "nodes": [str(Model().pk)]})
    assert unknown.status_code == 409


def test_what_a_node_reported_is_shown_with_where_it_came_from(
    viewer: JsonClient, node: Node, address: str
) -> None:
    revision = viewer.get(f"{address}/weights").json()["revision"]
    held = HeldWeights(
        revision, "ready", 100, 100, in_use=True, sources=(("s3", "s3://bucket", 60), ("folder", "/m", 40))
    )
    record_sight(node.pk, StoreSight(1, held=(held,)), names={}, now=NOW)
    found = row(viewer, address)
    assert (found["state"], found["have_bytes"], found["in_use"]) == ("ready", 100, True)
    assert found["sources"] == {"s3 s3://bucket": 60, "folder /m": 40}


def test_prewarming_has_rules_that_are_checked(operator: JsonClient, node: Node, address: str) -> None:
    good = {"nodes": [node.name], "from_minute": 1320, "until_minute": 360, "at_once": 4, "reason": "nights"}
    body = operator.post(f"{address}/prewarm", good).json()
    assert body["policy"]["node_names"] == [node.name]
    assert (body["policy"]["from_minute"], body["policy"]["at_once"]) == (1320, 4)
    for bad in ({"nodes": ["nobody"]}, {"busiest_ratio": 2}, {"bytes_per_second": 5}, {"at_once": 0}):
        assert operator.post(f"{address}/prewarm", good | bad).status_code == 400, bad
    for bad in ({"bytes_per_second": 2**63}, {"bytes_per_second": 10**15 + 1}):
        assert operator.post(f"{address}/prewarm", good | bad).status_code == 400, bad
        want = {"action": "want", "nodes": [str(node.pk)], "reason": "x"}
        assert operator.post(f"{address}/weights", want | bad).status_code == 400, bad
    pause = {"paused": True, "reason": "the link is needed"}
    assert operator.patch(f"{address}/prewarm", pause).json()["policy"]["enabled"] is False
    assert operator.patch(f"{address}/prewarm", pause | {"paused": False}).json()["policy"]["enabled"] is True
    assert operator.delete(f"{address}/prewarm").json()["policy"] is None
    assert operator.patch(f"{address}/prewarm", pause).status_code == 409


def test_storage_and_origins_name_secrets_and_never_hold_any(operator: JsonClient, address: str) -> None:
    place = {"kind": "hub", "location": "https://hub.example/o/n/resolve/abc", "secret": "hub-token"}
    wish = {"storage": "node", "origins": [place], "reason": "fast starts"}
    body = operator.post(f"{address}/storage", wish).json()
    assert (body["storage"], body["origins"]) == ("node", [place])
    leaky = place | {"location": "https://user:secret@hub.example/o/n"}
    answer = operator.post(f"{address}/storage", wish | {"origins": [leaky]})
    assert answer.status_code == 400
    back = operator.post(f"{address}/storage", {"storage": "in_place", "reason": "x", "origins": []}).json()
    assert back["origins"][0]["kind"] == "folder"


def test_a_model_that_has_no_manifest_says_what_to_do(operator: JsonClient, node: Node) -> None:
    bare = make_model("bare")
    wish = {"action": "want", "nodes": [str(node.pk)], "reason": "x"}
    answer = operator.post(f"/api/v1/models/{bare.pk}/weights", wish)
    assert answer.status_code == 409
    assert "register its folder again" in str(answer.json())


@pytest.mark.parametrize("path", ["storage", "compiled"])
def test_origins_at_addresses_that_mean_the_node_or_its_cloud_are_refused_however_they_are_written(
    operator: JsonClient, address: str, settings: Any, tmp_path: Path, path: str
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "k.so").write_bytes(b"code")
    wish: dict[str, Any] = {"storage": "node", "reason": "x"}
    if path == "compiled":
        wish = {"engine": "torch", "folder": str(tmp_path / "set"), "reason": "x"}
    metadata = ("169.254.169.254", "[fd00:ec2::254]", "2852039166", "0xa9fea9fe")
    loopback = ("127.0.0.1:1", "2130706433", "127.1", "0x7f.0.0.1", "localhost", "[::1]:80")
    for local, refused in ((False, metadata + loopback), (True, metadata)):
        settings.ENV = replace(settings.ENV, allow_local_addresses=local)
        for host in refused:
            place = {"kind": "http", "location": f"http://{host}/x"}
            answer = operator.post(f"{address}/{path}", wish | {"origins": [place]})
            assert answer.status_code == 400, host
            assert "the node's own or its cloud's" in str(answer.json()), host
    near = {"kind": "http", "location": "http://127.0.0.1:1/x"}
    assert operator.post(f"{address}/{path}", wish | {"origins": [near]}).status_code in (200, 201)
