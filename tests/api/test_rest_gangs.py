"""Replicas over several nodes over REST: asked for, planned, and shown with their members."""

from __future__ import annotations

import pytest

from exaserve_ops.inventory.models import Node
from exaserve_ops.telemetry.domain.pictures import LogEntry
from tests.api.conftest import Telemetry
from tests.fakes.gang_records import make_gang_of_two
from tests.fakes.world import JsonClient, make_model, make_node

pytestmark = pytest.mark.django_db


def test_replica_has_its_members_and_each_node_its_use(viewer: JsonClient) -> None:
    replica = make_gang_of_two()
    body = viewer.get(f"/api/v1/replicas/{replica.pk}").json()
    assert (body["node_count"], body["gang_epoch"], body["gang_crashes"]) == (2, 1, 1)
    assert [(m["number"], m["node_name"], m["state"]) for m in body["members"]] == [
        (0, "wide-0", "loading"),
        (1, "wide-1", "failed"),
    ]
    assert body["members"][0]["rendezvous"] == "10.0.0.1:4001"
    assert body["members"][1]["exit_text"] == "killed by signal 9 after 4.0 s"
    for member in body["members"]:
        use = viewer.get(f"/api/v1/nodes/{member['node']}").json()["use"]
        [held] = [one for one in use if one["uuid"] == member["accelerators"][0]]
        assert [one["name"] for one in held["replicas"]] == [replica.name]
        assert held["reserved_bytes"] == member["reserved_bytes"] > 0


def test_log_and_last_end_of_each_member_are_told_and_unknown_ones_refused(
    viewer: JsonClient, telemetry: Telemetry
) -> None:
    replica = make_gang_of_two()
    address = f"/api/v1/replicas/{replica.pk}"
    telemetry.logs[str(replica.pk), 1] = [
        LogEntry("1-0", 1, ("a", "b"), 0),
        LogEntry("2-0", 2, ("c",), 5),
        LogEntry("3-0", 2, ("x" * 200_000,), 0),
    ]
    body = viewer.get(f"{address}/log?member=1").json()
    assert (body["member"], body["node_name"], body["position"], body["dropped"]) == (1, "wide-1", "2-0", 5)
    assert [(line["attempt"], line["text"]) for line in body["lines"]] == [(1, "a"), (1, "b"), (2, "c")]
    rest = viewer.get(f"{address}/log?member=1&after=2-0").json()
    assert (rest["position"], [len(line["text"]) for line in rest["lines"]]) == ("3-0", [200_000])
    head = viewer.get(f"{address}/log?after=9-9").json()
    assert (head["member"], head["node_name"], head["position"], head["lines"]) == (0, "wide-0", "9-9", [])
    ended = viewer.get(f"{address}/exit-log?member=1").json()
    assert (ended["attempt"], ended["signal"], ended["log_tail"]) == (1, 9, ["last words", "bye <b>"])
    assert viewer.get(f"{address}/exit-log").json()["attempt"] is None, "the head lives"
    for path in ("log", "exit-log"):
        unknown = viewer.get(f"{address}/{path}?member=2")
        assert unknown.status_code == 400
        assert "it has members 0 to 1: there is no member '2'" in unknown.content.decode()
        assert viewer.get(f"{address}/{path}?stage=1").status_code == 400
    assert viewer.get(f"{address}/log?after=yesterday").status_code == 400
    Node.objects.filter(name="wide-1").update(protocol_minor=6)
    old = viewer.get(f"{address}/log?member=1")
    assert old.status_code == 409
    assert "wide-1 cannot show it: its agent speaks 1.6" in old.content.decode()


def test_deployment_is_made_planned_and_refused_with_its_field(operator: JsonClient) -> None:
    for name in ("a", "b"):
        make_node(name, supernode="s1")
    wish = {
        "name": "wide", "model": str(make_model().pk), "replicas": 2, "engine": "torch",
        "engine_options": {"pipeline_stages": 2}, "replica_memory_bytes": 1 << 28, "nodes_per_replica": 3,
    }  # fmt: skip
    refused = operator.post("/api/v1/deployments", wish)
    assert refused.status_code == 400
    assert "nodes_per_replica" in refused.json()["fields"] if "fields" in refused.json() else refused.json()
    deep = {"engine_options": {"pipeline_stages": 5}, "nodes_per_replica": 5}
    too_deep = operator.post("/api/v1/deployments", wish | deep)
    assert too_deep.status_code == 400
    assert "tiny has 2 layers" in too_deep.content.decode()
    Node.objects.update(engines=["torch", "vllm"])
    uneven = {"engine": "vllm", "engine_options": {"tensor_parallel_size": 3}}
    refused = operator.post("/api/v1/deployments", wish | uneven)
    assert refused.status_code == 400
    assert "tiny has 4 attention heads and 2 key-value heads" in refused.content.decode()
    made = operator.post("/api/v1/deployments", wish | {"nodes_per_replica": 2})
    assert made.status_code == 201, made.json()
    assert made.json()["nodes_per_replica"] == 2
    plan = operator.post(f"/api/v1/deployments/{made.json()['id']}/plan", {"replicas": 1}).json()
    assert [step["action"] for step in plan["steps"]] == ["create"]
