"""Slices, shares and the opened pool, from what people ask to what agents are told; weights count once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.adapters.agentlink import _spec
from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.inventory.domain.facts import AcceleratorFacts, NodeFacts
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import advance_liveness, create_join_token, enrol_node, record_hello
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.domain.placement import Placement, Refusal, choose_placement
from exaserve_ops.serving.domain.reconcile import Place, Wait, plan_deployment
from exaserve_ops.serving.domain.rooms import NodeRoom
from exaserve_ops.serving.domain.starts import plan_starts
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.selectors import deployment_snapshot, node_rooms, wanted_of_node
from exaserve_ops.serving.selectors.starts import start_facts
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment, update_deployment
from exaserve_ops.serving.services.replicas import (
    advance_replica,
    create_replicas,
    place_replica,
    place_replicas,
)
from exaserve_ops.serving.services.starts import carry_out_starts
from tests.dashboard.conftest import MemoryReader
from tests.fakes.world import GIB, NOW, JsonClient, client_with_key, make_model, make_node, make_user
from workers.protocol.wish import MpsLimits

pytestmark = pytest.mark.django_db

CARDS = (
    AcceleratorFacts("GPU-cut", "cuda", "H100", 80 * GIB, 0, split=True),
    AcceleratorFacts("MIG-1", "cuda", "H100 MIG", 40 * GIB, 0, parent_uuid="GPU-cut", profile="3g.40gb"),
    AcceleratorFacts("MIG-2", "cuda", "H100 MIG", 40 * GIB, 0, parent_uuid="GPU-cut", profile="3g.40gb"),
    AcceleratorFacts("GPU-whole", "cuda", "H100", 80 * GIB, 1),
)


@pytest.fixture(autouse=True)
def reader() -> None:
    live_reader.use(MemoryReader())


@pytest.fixture
def operator() -> JsonClient:
    return client_with_key(make_user("olga", "operator"))


@pytest.fixture
def browser() -> Client:
    client = Client()
    client.force_login(make_user("otto", "operator"))
    return client


def cut_node(name: str = "n1", *, cards: tuple[AcceleratorFacts, ...] = CARDS, mps: str = "") -> Node:
    """A node with a card that is cut into two slices, and a whole one."""
    _, text = create_join_token(actor="test", now=NOW)
    node = enrol_node(token_text=text, node_id=uuid4(), name=name, hostname=name, now=NOW)
    facts = NodeFacts(name, "10.0.0.1", "0.1", "b1", engines=("torch",), accelerators=cards)
    record_hello(node.pk, replace(facts, mps_ready=not mps, mps_note=mps), now=NOW)
    return advance_liveness(node.pk, "reported", reason="", actor="test", now=NOW)


def deploy(name: str = "trial", *, model: Model | None = None, **changes: Any) -> Deployment:
    wish = DeploymentWish(
        name=name,
        model_id=(model or make_model(f"model-of-{name}")).pk,
        replicas=changes.pop("replicas", 1),
        engine="torch",
        replica_memory_bytes=changes.pop("memory_bytes", 20 * GIB),
        **changes,
    )
    return create_deployment(wish, actor="test", now=NOW)


def carry_out(deployment: Deployment) -> tuple[list[Replica], list[str]]:
    """Make what is missing and place it as planned; returns the placed, and why others wait."""
    have = Replica.objects.filter(deployment=deployment).exclude(status="stopped").count()
    create_replicas(deployment.pk, deployment.replicas - have, why="test", actor="test", now=NOW)
    snapshot = deployment_snapshot(deployment.pk, active_sessions={}, now=NOW)
    assert snapshot is not None
    placed, waits = [], []
    for step in plan_deployment(snapshot, now=NOW):
        if isinstance(step, Place):
            placed.append(place_replica(UUID(step.replica_id), step.placement, actor="test", now=NOW))
        elif isinstance(step, Wait):
            waits.append(step.why)
    return placed, waits


def uuids_of(replicas: list[Replica]) -> list[str]:
    return sorted(a.uuid for replica in replicas for a in replica.accelerators.all())


def room_of(deployment: Deployment) -> NodeRoom:
    [room] = node_rooms(deployment.pk, now=NOW)
    return room


# -- from the wish to the agent -----------------------------------------------------------------------------
def test_trial_gets_slices_one_each_and_the_third_waits_with_the_count() -> None:
    cut_node()
    placed, waits = carry_out(deploy(replicas=3, accelerator="slice:3g.40gb"))
    assert uuids_of(placed) == ["MIG-1", "MIG-2"]
    assert waits == ["2 slices 3g.40gb in the fleet, both taken"]


def test_slice_is_free_again_when_its_replica_is_gone_and_not_before() -> None:
    cut_node(cards=CARDS[:2])
    deployment = deploy(accelerator="slice:3g.40gb", replicas=1)
    [first], _ = carry_out(deployment)
    other = deploy("other", accelerator="slice")
    assert carry_out(other) == ([], ["1 slice in the fleet, taken"])
    for event in ("stop", "seen_stopped"):
        assert uuids_of(carry_out(other)[0]) == []
        advance_replica(first.pk, event, reason="", actor="test", now=NOW)
    assert uuids_of(carry_out(other)[0]) == ["MIG-1"]


def test_whole_means_no_slice_and_a_cut_card_is_never_used_as_a_whole() -> None:
    cut_node()
    placed, waits = carry_out(deploy(replicas=5, accelerator="whole", memory_bytes=30 * GIB))
    assert [uuid for replica in placed for uuid in uuids_of([replica])] == ["GPU-whole", "GPU-whole"]
    assert len(set(waits)) == 1
    assert "at most 18841 MiB is free" in waits[0]


def test_opened_pool_is_used_when_slices_are_gone_and_given_back_first() -> None:
    cut_node()
    deployment = deploy(replicas=3, accelerator="slice:3g.40gb")
    carry_out(deployment)
    update_deployment(
        deployment.pk, {"spill": True, "spill_reason": "launch day"}, actor="user:olga", now=NOW
    )
    event = Event.objects.filter(subject_id=deployment.pk).latest("pk")
    assert (event.event, event.actor) == ("pool_opened", "user:olga")
    assert event.reason == "launch day"
    deployment.refresh_from_db()
    [spilled], waits = carry_out(deployment)
    assert (uuids_of([spilled]), waits) == (["GPU-whole"], [])
    assert "whole cards are opened to it: launch day" in spilled.reason
    for replica in Replica.objects.filter(status="placed"):
        advance_replica(replica.pk, "seen_ready", reason="", actor="test", now=NOW)
    update_deployment(deployment.pk, {"spill": False, "replicas": 2}, actor="test", now=NOW, reason="over")
    snapshot = deployment_snapshot(deployment.pk, active_sessions={}, now=NOW)
    assert snapshot is not None
    [let_go] = plan_deployment(snapshot, now=NOW)
    assert let_go.replica_id == str(spilled.pk)  # type: ignore[union-attr]  # a LetGo
    assert "has a whole card" in let_go.why
    assert Deployment.objects.get().placement == {"accelerator": "slice:3g.40gb"}


def test_closing_alone_is_an_event_of_its_own() -> None:
    deployment = deploy(accelerator="slice", spill=True, spill_reason="load")
    update_deployment(deployment.pk, {"spill": False}, actor="test", now=NOW, reason="load is over")
    event = Event.objects.filter(subject_id=deployment.pk).latest("pk")
    assert event.event == "pool_closed"
    assert event.reason == "load is over"


def test_mps_share_is_placed_where_a_daemon_answers_and_told_to_the_agent() -> None:
    asleep, ready = cut_node("asleep", cards=(), mps="no MPS control daemon answers"), cut_node("ready")
    deployment = deploy(mps_thread_percent=30, mps_memory_bytes=25 * GIB, accelerator="whole", replicas=4)
    placed, waits = carry_out(deployment)
    assert {replica.node_id for replica in placed} == {ready.pk}
    assert len(placed) == 3
    assert "no MPS here: no MPS control daemon answers" in waits[0]
    assert "90% of its threads are promised, 30% more are needed" in waits[0]
    carry_out_starts(plan_starts(start_facts(()), now=NOW), actor="test", now=NOW)
    [told, *_] = wanted_of_node(ready.pk)
    assert _spec(told).mps == MpsLimits(thread_percent=30, memory_bytes=25 * GIB)
    assert _spec(told).memory_bytes == 20 * GIB
    assert wanted_of_node(asleep.pk) == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"accelerator": "slice:huge"}, "accelerator"),
        ({"accelerator": "slice", "accelerators_per_replica": 2}, "accelerators_per_replica"),
        ({"mps_memory_bytes": 10 * GIB}, "mps_memory_bytes"),
        ({"accelerator": "slice", "spill": True}, "spill_reason"),
        ({"slice_memory_bytes": GIB}, "slice_memory_bytes"),
    ],
)
def test_wish_that_makes_no_sense_is_refused_at_creation(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        deploy(**changes)
    assert caught.value.field == field
    assert not Deployment.objects.exists()


def test_change_is_checked_as_a_whole_and_shares_cannot_be_changed() -> None:
    deployment = deploy(accelerator="slice", spill=True, spill_reason="load")
    for changes, field in (
        ({"accelerator": "whole"}, "spill"),
        ({"mps_thread_percent": 10}, "mps_thread_percent"),
        ({"spill": True, "spill_reason": ""}, "spill_reason"),
    ):
        with pytest.raises(InvalidInputError) as caught:
            update_deployment(deployment.pk, changes, actor="test", now=NOW)
        assert caught.value.field == field
    update_deployment(deployment.pk, {"accelerator": "whole", "spill": False}, actor="test", now=NOW)
    deployment.refresh_from_db()
    assert deployment.placement == {"accelerator": "whole"}
    make_node("n1")
    update_deployment(deployment.pk, {"nodes": ["n1"]}, actor="test", now=NOW)
    deployment.refresh_from_db()
    assert deployment.placement == {"accelerator": "whole", "nodes": ["n1"]}


def test_slice_is_not_given_twice_whatever_two_leaders_saw() -> None:
    cut_node(cards=CARDS[:2])
    first, second = (deploy(name, accelerator="slice") for name in ("first", "second"))
    stale = deployment_snapshot(second.pk, active_sessions={}, now=NOW)
    [taker], _ = carry_out(first)
    assert stale is not None
    choice = choose_placement(stale.request, stale.nodes)
    assert isinstance(choice, Placement), "as it was before"
    [late] = create_replicas(second.pk, 1, why="test", actor="test", now=NOW)
    with pytest.raises(ConflictError, match="slice MIG-1 was taken meanwhile"):
        place_replica(late.pk, choice, actor="test", now=NOW)
    late.refresh_from_db()
    assert (late.status, uuids_of([late]), uuids_of([taker])) == ("pending", [], ["MIG-1"])


def test_slice_has_several_replicas_only_as_clients_of_mps() -> None:
    node = cut_node(cards=CARDS[:2])
    shared, alone = deploy("shared", mps_thread_percent=50, memory_bytes=5 * GIB), deploy("alone")
    place = Placement(str(node.pk), node.name, ("MIG-1",), "test")
    made = create_replicas(shared.pk, 2, why="test", actor="test", now=NOW)
    place_replicas({replica.pk: place for replica in made}, actor="test", now=NOW)
    [other] = create_replicas(alone.pk, 1, why="test", actor="test", now=NOW)
    with pytest.raises(ConflictError):
        place_replica(other.pk, place, actor="test", now=NOW)


# -- memory -------------------------------------------------------------------------------------------------
def test_deployments_of_one_model_share_its_weights_on_a_cpu_until_the_last_is_gone() -> None:
    cpu = AcceleratorFacts("CPU-n1", "cpu", "CPU", 10 * GIB)
    cut_node(cards=(cpu,))
    model = make_model("shared")
    Model.objects.filter(pk=model.pk).update(parameter_count=GIB // 4)  # a GiB in float32
    first = deploy("first", model=model, replicas=2, memory_bytes=3 * GIB // 2)
    second = deploy("second", model=model, memory_bytes=3 * GIB // 2)
    private = deploy("own", model=model, memory_bytes=3 * GIB // 2, engine_options={"weights": "private"})
    replicas, _ = carry_out(first)
    replicas += carry_out(second)[0]
    [room] = room_of(second).accelerators
    assert room.reserved_bytes == GIB + 3 * GIB // 2
    assert room_of(second).own_bytes == 3 * GIB // 2
    assert room_of(first).own_bytes == 2 * GIB, "its weights once"
    carry_out(private)
    [room] = room_of(second).accelerators
    assert room.reserved_bytes == GIB + 3 * GIB // 2 + 3 * GIB // 2
    for left, replica in zip((4 * GIB - GIB // 2, 3 * GIB, 3 * GIB // 2), replicas, strict=True):
        for event in ("stop", "seen_stopped"):
            advance_replica(replica.pk, event, reason="", actor="test", now=NOW)
        [room] = room_of(second).accelerators
        assert room.reserved_bytes == left


def test_card_counts_shared_weights_once_from_when_its_agent_says_that_it_can() -> None:
    whole = AcceleratorFacts("GPU-1", "cuda", "H100", 80 * GIB)
    node = cut_node(cards=(whole,))
    model = make_model("big")
    Model.objects.filter(pk=model.pk).update(weights_bytes=30 * GIB, parameter_count=15 * GIB)
    deployment = deploy("cards", model=model, memory_bytes=34 * GIB, replicas=6)
    placed, waits = carry_out(deployment)
    assert (len(placed), len(waits)) == (2, 4)
    facts = NodeFacts("n1", "10.0.0.1", "0.1", "b1", engines=("torch",))
    record_hello(node.pk, replace(facts, accelerators=(replace(whole, shares_memory=True),)), now=NOW)
    more, waits = carry_out(deployment)
    assert (len(more), waits) == (4, [])
    assert "its weights lie there already, it adds 4096 MiB" in more[0].reason
    [room] = room_of(deployment).accelerators
    assert room.reserved_bytes == 30 * GIB + 6 * 4 * GIB


def test_vllm_at_its_share_of_a_small_model_leaves_no_room_for_another() -> None:
    node = make_node("n1", accelerators=1)
    Node.objects.filter(pk=node.pk).update(engines=["torch", "vllm"])
    wish = DeploymentWish("big", make_model("m").pk, 2, "vllm", replica_memory_bytes=GIB // 2)
    placed, waits = carry_out(create_deployment(wish, actor="test", now=NOW))
    assert len(placed) == 1
    assert "needs 7536 MiB an accelerator" in waits[0], "0.92 of 8 GiB, whatever the model needs"


def test_unknown_size_is_not_placed_and_the_reason_says_what_to_do() -> None:
    make_node("n1")
    model = make_model("deepseek-r1")
    Model.objects.filter(pk=model.pk).update(weights_bytes=0, kv_bytes_per_token=None)
    deployment = deploy("unknown", model=model, memory_bytes=0)
    placed, waits = carry_out(deployment)
    assert placed == []
    assert "make the deployment with a memory per replica" in waits[0]
    told = deploy("told", model=model, memory_bytes=GIB)
    assert len(carry_out(told)[0]) == 1


# -- seen and steered --------------------------------------------------------------------------
def test_rest_asks_for_slices_and_shares_and_opens_the_pool(operator: JsonClient) -> None:
    cut_node()
    body = {
        "name": "trial", "model": str(make_model().pk), "replicas": 1, "engine": "torch",
        "replica_memory_bytes": 20 * GIB, "accelerator": "slice:3g.40gb", "slice_memory_bytes": 30 * GIB,
        "mps_thread_percent": 50, "mps_memory_bytes": 20 * GIB,
    }  # fmt: skip
    made = operator.post("/api/v1/deployments", body)
    assert made.status_code == 201, made.json()
    said = made.json()
    assert {name: said[name] for name in body if name != "model"} == {
        name: value for name, value in body.items() if name != "model"
    }
    assert (said["spill"], said["spill_reason"]) == (False, "")
    address = f"/api/v1/deployments/{said['id']}"
    opened = operator.patch(address, {"spill": True, "spill_reason": "peak", "generation": 1})
    assert (opened.status_code, opened.json()["spill"]) == (200, True)
    refused = operator.patch(address, {"accelerator": "slice:none", "generation": 2})
    assert refused.status_code == 400
    assert "accelerator" in refused.json()["error"]["fields"]
    plain = operator.post("/api/v1/deployments", {**body, "name": "bad", "mps_memory_bytes": GIB})
    assert "below what a replica needs" in plain.json()["error"]["fields"]["mps_memory_bytes"][0]


def test_rest_tells_who_uses_a_slice_and_what_a_plan_takes(operator: JsonClient) -> None:
    node = cut_node()
    deployment = deploy(accelerator="slice:3g.40gb", replicas=2)
    create_replicas(deployment.pk, 2, why="test", actor="test", now=NOW)
    plan = operator.get(f"/api/v1/deployments/{deployment.pk}/plan").json()
    assert [(step["accelerators"], step["reserved_bytes"]) for step in plan["steps"]] == [
        (["MIG-1"], 20 * GIB),
        (["MIG-2"], 20 * GIB),
    ]
    [first, _], _ = carry_out(deployment)
    told = operator.get(f"/api/v1/nodes/{node.pk}").json()
    use = {row["uuid"]: row for row in told["use"]}
    assert use["MIG-1"]["replicas"] == [{"id": str(first.pk), "name": first.name}]
    assert use["MIG-1"]["reserved_bytes"] == 20 * GIB
    assert use["GPU-whole"]["margin_bytes"] == 80 * GIB // 50
    assert (use["GPU-whole"]["replicas"], use["GPU-whole"]["reserved_bytes"]) == ([], 0)
    assert told["mps_ready"] is True
    losses = operator.get(f"/api/v1/deployments/{deployment.pk}/spread").json()["losses"]
    assert losses[0]["memory_bytes"] == 40 * GIB


def test_form_offers_the_slices_that_there_are(browser: Client) -> None:
    cut_node()
    form = {
        "name": "trial", "model": str(make_model().pk), "replicas": 1, "engine": "torch",
        "memory_mib": 20 << 10, "accelerators_per_replica": 1, "drain_seconds": 60,
        "accelerator": "slice:3g.40gb", "mps_thread_percent": 25, "step": "plan",
    }  # fmt: skip
    assert "a slice 3g.40gb" in browser.get(reverse("deployment_new")).content.decode()
    bad = browser.post(reverse("deployment_new"), {**form, "mps_memory_mib": 100})
    assert bad.status_code == 422
    assert "below what a replica needs" in bad.content.decode()
    plan = browser.post(reverse("deployment_new"), form)
    assert plan.status_code == 200, plan.content.decode()
    browser.post(reverse("deployment_new"), {**form, "step": "create", "planned": plan.context["planned"]})
    made = Deployment.objects.get()
    assert made.placement == {"accelerator": "slice:3g.40gb", "mps_thread_percent": 25}


def test_pages_show_what_was_asked_and_got_and_open_the_pool(browser: Client) -> None:
    node = cut_node()
    deployment = deploy(accelerator="slice:3g.40gb", replicas=3)
    [first, _], _ = carry_out(deployment)
    page = browser.get(reverse("deployment", args=[deployment.pk])).content.decode()
    assert "a slice 3g.40gb" in page
    assert "closed to it" in page
    pool = reverse("deployment_pool", args=[deployment.pk])
    browser.post(pool, {"open": "yes", "reason": " "})
    assert not Deployment.objects.get().placement.get("spill")
    browser.post(pool, {"open": "yes", "reason": "launch day"})
    deployment.refresh_from_db()
    assert deployment.placement["spill_reason"] == "launch day"
    carry_out(deployment)
    now = browser.get(reverse("deployment_plan", args=[deployment.pk])).content.decode()
    assert "slice 3g.40gb" in now
    assert "whole card, H100" in now
    assert "not a slice" in now
    told = browser.get(reverse("node", args=[node.pk])).content.decode()
    assert first.name in told
    assert "its slices below" in told
    assert "a daemon answers" in told
    browser.post(pool, {"open": "no", "reason": "over"})
    assert Event.objects.filter(event="pool_closed", subject_id=deployment.pk).exists()


def test_plain_deployment_has_no_switch_and_refuses_it(browser: Client) -> None:
    deployment = deploy()
    page = browser.get(reverse("deployment", args=[deployment.pk])).content.decode()
    assert "Open whole cards" not in page
    answer = browser.post(
        reverse("deployment_pool", args=[deployment.pk]), {"open": "yes", "reason": "x"}, follow=True
    )
    assert "only what asks for slices can spill over" in answer.content.decode()


def test_nothing_fits_where_only_a_cut_card_is_left() -> None:
    cut_node(cards=CARDS[:1])
    deployment = deploy()
    snapshot = deployment_snapshot(deployment.pk, active_sessions={}, now=NOW)
    assert snapshot is not None
    refusal = choose_placement(snapshot.request, snapshot.nodes)
    assert isinstance(refusal, Refusal)
    assert "GPU-cut is in MIG mode: its slices count" in refusal.summary()
