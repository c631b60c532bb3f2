"""What people and programs see of healing: pages and REST."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.inventory.models import Accelerator, Node
from exaserve_ops.inventory.services import advance_liveness
from exaserve_ops.inventory.services.quarantine import quarantine_accelerators
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.domain.reach import ReachVerdict
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.services.healing import record_hold, record_slowness
from exaserve_ops.serving.services.reach import record_reach
from exaserve_ops.serving.services.replicas import (
    advance_replica,
    create_replicas,
    place_replica,
    record_node_lost,
)
from tests.dashboard.conftest import MemoryReader
from tests.fakes.world import NOW, JsonClient, client_with_key, make_deployment, make_node, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def reader() -> None:
    live_reader.use(MemoryReader())


@pytest.fixture
def operator() -> JsonClient:
    return client_with_key(make_user("olga", "operator"))


@pytest.fixture
def viewer() -> JsonClient:
    return client_with_key(make_user("vera", "viewer"))


@pytest.fixture
def browser() -> Client:
    client = Client()
    client.force_login(make_user("otto", "operator"))
    return client


def running(deployment: Deployment, node: Node, index: int = 0, role: str = "serving") -> Replica:
    [made] = create_replicas(deployment.pk, 1, why="test", actor="test", now=NOW, role=role)
    place = Placement(str(node.pk), node.name, (f"GPU-{node.name}-{index}",), "test")
    place_replica(made.pk, place, actor="test", now=NOW)
    made = advance_replica(made.pk, "seen_ready", reason="", actor="test", now=NOW)
    if role == "serving":
        record_reach({made.pk: ReachVerdict("reached")}, actor="test", now=NOW)
    return made


def plan_of(client: JsonClient, deployment: Deployment) -> dict[str, list[dict[str, object]]]:
    answer = client.get(f"/api/v1/deployments/{deployment.pk}/plan")
    assert answer.status_code == 200, answer.json()
    body: dict[str, list[dict[str, object]]] = answer.json()
    return body


def test_plan_of_now_names_steps_causes_and_what_is_waited_for(viewer: JsonClient) -> None:
    nodes = [make_node(f"n{i}", rack=f"r{i}") for i in range(3)]
    deployment = make_deployment(replicas=2)
    lost, standby = running(deployment, nodes[0]), running(deployment, nodes[1], role="standby")
    kept = running(deployment, nodes[2])
    Deployment.objects.filter(pk=deployment.pk).update(standbys=1)
    assert plan_of(viewer, deployment)["steps"] == []
    advance_liveness(nodes[0].pk, "lost", reason="no report", actor="test", now=NOW)
    record_node_lost(nodes[0].pk, reason="no report", actor="test", now=NOW)
    promote, replace = plan_of(viewer, deployment)["steps"]
    assert (promote["action"], promote["replica"], promote["instead_of"]) == (
        "promote",
        str(standby.pk),
        str(lost.pk),
    )
    assert (replace["action"], replace["cause"], replace["replica"]) == ("replace", "node_lost", str(lost.pk))
    assert replace["node_name"] in {"n1", "n2"}
    assert all(step["why"] for step in (promote, replace))
    kept.refresh_from_db()
    assert kept.status == "ready"
    assert not Replica.objects.filter(replaces__isnull=False).exists(), "shown, not done"


def test_plan_says_what_a_replica_waits_for(viewer: JsonClient) -> None:
    node = make_node("n1")
    deployment = make_deployment(replicas=1)
    Deployment.objects.filter(pk=deployment.pk).update(placement={"nodes": ["n1"]})
    lost = running(deployment, node)
    advance_liveness(node.pk, "lost", reason="no report", actor="test", now=NOW)
    record_node_lost(node.pk, reason="no report", actor="test", now=NOW)
    [waiting] = plan_of(viewer, deployment)["waiting"]
    assert waiting["replica"] == str(lost.pk)
    assert "no room elsewhere: n1: dead" in str(waiting["why"])


def test_spread_says_what_each_loss_would_cost(viewer: JsonClient) -> None:
    nodes = [make_node("n0", rack="r0"), make_node("n1", rack="r1")]
    deployment = make_deployment(replicas=3)
    for index, node in ((0, nodes[0]), (1, nodes[0]), (0, nodes[1])):
        running(deployment, node, index)
    running(deployment, nodes[1], 1, role="standby")
    body = viewer.get(f"/api/v1/deployments/{deployment.pk}/spread").json()
    first = body["losses"][0]
    assert (first["kind"], first["name"], first["serving"], first["fair_share"]) == ("rack", "r0", 2, 1.5)
    assert body["worst_ratio"] == pytest.approx(2 / 3)
    assert {(loss["name"], loss["standbys"]) for loss in body["losses"] if loss["standbys"]} == {
        ("r1", 1),
        ("n1", 1),
    }


def test_standbys_and_limits_are_set_and_counted_apart_over_rest(operator: JsonClient) -> None:
    node, deployment = make_node("n1"), make_deployment(replicas=1)
    running(deployment, node)
    running(deployment, node, 1, role="standby")
    url = f"/api/v1/deployments/{deployment.pk}"
    change = {"standbys": 2, "stall_seconds": 90, "drain_slow": True, "start_seconds": 0, "generation": 1}
    body = operator.patch(url, change).json()
    assert (body["standbys"], body["stall_seconds"], body["drain_slow"]) == (2, 90, True)
    assert body["start_seconds"] == 300
    assert (body["ready_replicas"], body["ready_standbys"], body["kept_standbys"]) == (1, 1, 1)
    refused = operator.patch(url, {"standbys": -1, "generation": 2})
    assert refused.status_code == 400
    roles = {r["role"] for r in operator.get("/api/v1/replicas").json()["results"]}
    assert roles == {"serving", "standby"}


def test_quarantine_is_seen_and_lifted_with_a_reason(operator: JsonClient, viewer: JsonClient) -> None:
    make_node("n1")
    quarantine_accelerators(["GPU-n1-0"], reason="held by pid 4711", actor="test", now=NOW)
    url = "/api/v1/accelerators/GPU-n1-0"
    assert viewer.get(url).json()["quarantine_reason"] == "held by pid 4711"
    assert viewer.post(f"{url}/lift-quarantine", {"reason": "x"}).status_code == 403
    assert operator.post(f"{url}/lift-quarantine", {}).status_code == 400
    lifted = operator.post(f"{url}/lift-quarantine", {"reason": "the process is gone"})
    assert (lifted.status_code, lifted.json()["quarantined_at"]) == (200, None)
    assert operator.post(f"{url}/lift-quarantine", {"reason": "again"}).status_code == 409
    event = Event.objects.get(event="quarantine_lifted")
    assert (event.actor, event.reason) == ("user:olga", "the process is gone")


def test_page_of_a_node_lets_its_quarantine_be_lifted(browser: Client) -> None:
    node = make_node("n1")
    quarantine_accelerators(["GPU-n1-0"], reason="held by pid 4711", actor="test", now=NOW)
    page = browser.get(reverse("node", args=[node.pk])).content.decode()
    assert "held by pid 4711" in page
    address = reverse("node_lift_quarantine", args=[node.pk])
    browser.post(address, {"accelerator": "GPU-n1-0", "reason": ""})
    assert Accelerator.objects.get(pk="GPU-n1-0").quarantined_at is not None
    browser.post(address, {"accelerator": "GPU-n1-0", "reason": "gone"})
    assert Accelerator.objects.get(pk="GPU-n1-0").quarantined_at is None
    other = make_node("n2")
    foreign = reverse("node_lift_quarantine", args=[other.pk])
    assert browser.post(foreign, {"accelerator": "GPU-n1-0", "reason": "x"}).status_code == 404


def test_pages_show_role_slowness_holds_plan_and_losses(browser: Client) -> None:
    node, deployment = make_node("n1"), make_deployment(replicas=2)
    slow = running(deployment, node)
    standby = running(deployment, node, 1, role="standby")
    record_slowness(slow.pk, "time to first token 2 s, 0.2 s among its 4 peers", actor="t", now=NOW)
    record_hold(standby.pk, "healing is frozen: mass silence", actor="t", now=NOW)
    page = browser.get(reverse("deployment", args=[deployment.pk])).content.decode()
    for word in (">standby<", ">slow<", ">healing waits<", reverse("deployment_plan", args=[deployment.pk])):
        assert word in page, word
    part = browser.get(reverse("deployment_plan", args=[deployment.pk])).content.decode()
    for word in ("Done for it now", "rack r1", "promote", "it is to serve"):
        assert word in part, word
    one = browser.get(reverse("replica", args=[slow.pk])).content.decode()
    assert "Slower than its peers" in one
    assert "healing is frozen" in browser.get(reverse("replica", args=[standby.pk])).content.decode()


def test_scaling_page_plans_and_sets_standbys(browser: Client) -> None:
    make_node("n1")
    deployment = make_deployment(replicas=1)
    address = reverse("deployment_scale", args=[deployment.pk])
    page = browser.get(address, {"replicas": 1, "standbys": 1}).content.decode()
    assert "new standby" in page
    wish = {"replicas": 1, "standbys": 1, "generation": deployment.generation, "reason": "a busy week"}
    assert browser.post(address, wish).status_code == 302
    deployment.refresh_from_db()
    assert (deployment.replicas, deployment.standbys) == (1, 1)
    event = Event.objects.get(subject_id=str(deployment.pk), event="scaled")
    assert event.reason == "standbys 0 to 1: a busy week"


def test_deadline_of_a_drain_is_on_the_plan(viewer: JsonClient) -> None:
    node, deployment = make_node("n1"), make_deployment(replicas=0)
    going = running(deployment, node)
    Replica.objects.filter(pk=going.pk).update(
        wanted="drain", status="draining", drain_deadline_at=NOW + timedelta(minutes=1)
    )
    [waiting] = plan_of(viewer, deployment)["waiting"]
    assert waiting["why"] == "its sessions move, then its requests end, until 03:05:05 UTC at most"
    Replica.objects.filter(pk=going.pk).update(handed_over_at=NOW)
    [waiting] = plan_of(viewer, deployment)["waiting"]
    assert waiting["why"] == "its open requests end, until 03:05:05 UTC at most"
