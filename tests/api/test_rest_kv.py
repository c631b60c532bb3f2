"""KV memory of a node over REST: the facts, filters, and other limits for a replica."""

from __future__ import annotations

import pytest

from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import create_replicas, place_replica
from tests.api.conftest import Telemetry
from tests.fakes.kv_pools import load_of, pool_of, told_by
from tests.fakes.world import NOW, JsonClient, make_deployment
from workers.protocol.kv_pools import KvPool

pytestmark = pytest.mark.django_db


@pytest.fixture
def replica(node: Node) -> Replica:
    [made] = create_replicas(make_deployment().pk, 1, why="test", actor="test", now=NOW)
    uuid = node.accelerators.all()[0].uuid
    place_replica(made.pk, Placement(str(node.pk), node.name, (uuid,), "test"), actor="test", now=NOW)
    return made


def address(node: Node) -> str:
    return f"/api/v1/nodes/{node.pk}/kv-pool"


def other_pool(replica_id: str) -> KvPool:
    pool = pool_of(replica_id)
    return KvPool("cd" * 16, 16, 4096, 16, 64, 64, 0, 0.0, 0, pool.members)


def test_pools_are_told_with_their_map_and_what_the_engines_say(
    viewer: JsonClient, node: Node, telemetry: Telemetry
) -> None:
    telemetry.kv[str(node.pk)] = told_by(pool_of("a"), loads={"a": load_of()})
    body = viewer.get(address(node)).json()
    [pool] = body["pools"]
    [member] = pool["members"]
    assert (body["received_at"], body["simulated"]) == (9.0, False)
    assert (pool["capacity_blocks"], pool["block_tokens"], pool["fragmentation_ratio"]) == (64, 16, 0.25)
    assert (member["borrowed_blocks"], member["lent_blocks"]) == (16, 0)
    assert member["cached_by_age_blocks"] == [0, 4, 0, 0, 0]
    assert pool["cells"][1] == {"owner": 1, "live_ratio": 0.27, "cached_ratio": 0.27, "age": 2}
    [load] = body["replicas"]
    assert load["miss_tokens_total"]["evicted"] == 100
    assert [tier["name"] for tier in load["tiers"]] == ["accelerator", "host", "disk"]
    assert load["swaps"]["blocks_out"] == 34


def test_node_that_never_reported_has_nothing(viewer: JsonClient, node: Node) -> None:
    body = viewer.get(address(node)).json()
    assert body == {"received_at": None, "simulated": False, "pools": [], "replicas": []}
    assert viewer.get("/api/v1/nodes/00000000-0000-4000-8000-000000000000/kv-pool").status_code == 404


def test_filters_leave_one_replica_or_one_pool(viewer: JsonClient, node: Node, telemetry: Telemetry) -> None:
    telemetry.kv[str(node.pk)] = told_by(
        pool_of("a"), other_pool("b"), loads={"a": load_of(), "b": load_of()}
    )
    for query in ("replica=b", f"pool={'cd' * 16}"):
        body = viewer.get(f"{address(node)}?{query}").json()
        assert [pool["pool_id"] for pool in body["pools"]] == ["cd" * 16]
        assert [load["replica_id"] for load in body["replicas"]] == ["b"]
    assert viewer.get(f"{address(node)}?replica=z").json()["pools"] == []
    wrong = viewer.get(f"{address(node)}?replicas=b")
    assert (wrong.status_code, "no such filter" in wrong.content.decode()) == (400, True)


def test_limits_are_asked_for_by_those_who_may(
    operator: JsonClient, viewer: JsonClient, node: Node, replica: Replica
) -> None:
    url = f"{address(node)}/limits"
    wish = {"replica": str(replica.pk), "minimum_blocks": 32, "ceiling_blocks": 48, "reason": "busy"}
    assert viewer.post(url, wish).status_code == 403
    assert not Event.objects.filter(event="kv_limits_asked").exists()
    assert operator.post(url, wish).status_code == 202
    event = Event.objects.get(event="kv_limits_asked")
    assert (event.subject_id, event.reason) == (
        str(replica.pk),
        "at least 32 and at most 48 blocks: busy",
    )


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"reason": ""}, 400),
        ({"minimum_blocks": 0}, 400),
        ({"minimum_blocks": 64}, 400),
        ({"ceiling_blocks": 10**10}, 400),
        ({"floor_blocks": 1}, 400),
        ({"replica": "00000000-0000-4000-8000-000000000000"}, 409),
    ],
)
def test_limits_that_make_no_sense_are_refused_at_once(
    operator: JsonClient, node: Node, replica: Replica, changes: dict[str, object], status: int
) -> None:
    wish = {"replica": str(replica.pk), "minimum_blocks": 32, "ceiling_blocks": 48, "reason": "busy"}
    answer = operator.post(f"{address(node)}/limits", wish | changes)
    assert answer.status_code == status, answer.json()
    assert not Event.objects.filter(event="kv_limits_asked").exists()
