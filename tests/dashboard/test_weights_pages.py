"""The weights pages say which node has what, and their buttons do what they say."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.dashboard.wording import byte_size
from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.models import Model
from exaserve_ops.weights.domain.held import HeldWeights, StoreSight
from exaserve_ops.weights.models import PrewarmPolicy, WeightsClaim
from exaserve_ops.weights.services import record_sight
from tests.fakes.world import NOW, make_node

pytestmark = pytest.mark.django_db


@pytest.fixture
def model(stored_model: Model) -> Model:
    return stored_model


@pytest.fixture
def node(model: Model) -> Node:  # noqa: ARG001 - made with its world
    node = Node.objects.order_by("name").first()
    assert node is not None
    return node


def report(node: Node, model: Model, state: str, **facts: object) -> None:
    held = HeldWeights(model.digest, state, 100 << 20, 40 << 20, **facts)  # type: ignore[arg-type]  # facts of a test
    sight = StoreSight(1, disk_total_bytes=4 << 40, disk_free_bytes=1 << 40, used_bytes=1 << 30, held=(held,))
    record_sight(node.pk, sight, names={}, now=NOW)


def page(client: Client, model: Model) -> str:
    return client.get(reverse("weights_of_model", args=[model.pk])).content.decode()


def test_states_are_shown_with_sizes_reasons_and_where_bytes_came_from(
    viewer: Client, model: Model, node: Node
) -> None:
    report(
        node, model, "failed", reason="insufficient space: 9 needed", sources=(("s3", "s3://b", 40 << 20),)
    )
    text = page(viewer, model)
    assert "insufficient space: 9 needed" in text
    assert byte_size(40 << 20) in text
    assert "s3 s3://b" in text
    everything = viewer.get(reverse("weights")).content.decode()
    assert "1 failed" in everything
    assert node.name in everything
    assert byte_size(1 << 40) in everything
    assert "not fetched ahead" in everything


def test_nodes_that_pieces_came_from_are_named(viewer: Client, model: Model, node: Node) -> None:
    giver = make_node("giver-7")
    report(node, model, "ready", sources=(("peer", str(giver.pk), 40 << 20),))
    text = page(viewer, model)
    assert "peer giver-7" in text
    assert f"peer {giver.pk}" not in text


def test_weights_are_wanted_and_given_back_by_hand(operator: Client, model: Model, node: Node) -> None:
    address = reverse("weights_act", args=[model.pk])
    for act, there in (("want", True), ("pause", True), ("release", False)):
        answer = operator.post(address, {"act": act, "nodes": node.name, "reason": "launch"}, follow=True)
        assert "Done on 1 of 1 nodes" in answer.content.decode()
        assert WeightsClaim.objects.exists() is there
    unknown = operator.post(address, {"act": "want", "nodes": "nobody", "reason": "x"}, follow=True)
    assert "No node is named nobody" in unknown.content.decode()
    assert (
        "Say why" in operator.post(address, {"act": "want", "nodes": node.name}, follow=True).content.decode()
    )


def test_rules_are_set_shown_again_and_ended(operator: Client, model: Model, node: Node) -> None:
    address = reverse("weights_prewarm", args=[model.pk])
    rules = {
        "nodes": node.name,
        "begin": "22:00",
        "end": "06:30",
        "busiest_percent": 40,
        "megabytes_per_second": 200,
        "at_once": 3,
        "reason": "nights",
    }
    text = operator.post(address, rules, follow=True).content.decode()
    assert "1 node, 22:00 to 06:30 UTC, up to 40% busy, 3 at once" in text
    assert 'value="22:00"' in text
    policy = PrewarmPolicy.objects.get()
    assert (policy.from_minute, policy.until_minute, policy.bytes_per_second) == (1320, 390, 200_000_000)
    paused = operator.post(address, {"act": "pause", "reason": "the link is needed"}, follow=True)
    assert "paused; 1 node, 22:00" in paused.content.decode()
    assert "Go on" in operator.post(address, {"act": "pause"}, follow=True).content.decode()
    assert "paused;" not in operator.post(address, {"act": "resume"}, follow=True).content.decode()
    assert PrewarmPolicy.objects.get().enabled
    slow = operator.post(address, rules | {"megabytes_per_second": 1.5}, follow=True).content.decode()
    assert PrewarmPolicy.objects.get().bytes_per_second == 1_500_000
    assert 'value="1.5"' in slow
    wrong = operator.post(address, rules | {"nodes": "nobody"}, follow=True).content.decode()
    assert "no node in service is named nobody" in wrong
    operator.post(address, {"act": "end"})
    assert not PrewarmPolicy.objects.exists()


def test_storage_is_changed_with_origins_line_by_line(operator: Client, model: Model) -> None:
    address = reverse("weights_storage", args=[model.pk])
    asked = {"storage": "node", "reason": "fast", "origins": "s3 s3://bucket/m key\nhttp https://h.example/m"}
    text = operator.post(address, asked, follow=True).content.decode()
    assert "with secret key" in text
    model.refresh_from_db()
    assert [place["kind"] for place in model.origins] == ["s3", "http"]
    bad = operator.post(address, asked | {"origins": "one-word"}, follow=True).content.decode()
    assert "is not kind, address" in bad


def test_viewers_see_no_buttons(viewer: Client, operator: Client, model: Model) -> None:
    assert "Fetch, pause or give back" in page(operator, model)
    assert "Fetch, pause or give back" not in page(viewer, model)
    assert "Fetch ahead</button>" not in page(viewer, model)
