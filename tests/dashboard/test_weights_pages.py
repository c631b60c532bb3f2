"""The weights pages say which node has what, and their buttons do what they say."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from uuid import uuid4

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.dashboard.weights import LiveOnce, mix_of
from exaserve_ops.dashboard.wording import byte_size
from exaserve_ops.inventory.models import FailureDomain, Node
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.selectors.weights import NodeRow
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


def test_hundreds_of_nodes_are_paged_and_those_in_need_come_first(operator: Client, model: Model) -> None:
    domain = FailureDomain.objects.create(kind="host", name="many")
    for number in range(60):
        node = Node.objects.create(name=f"many-{number:03}", failure_domain=domain)
        problem = "the disk is read-only" if number == 59 else ""
        held = HeldWeights(model.digest, "failed" if problem else "ready", 8 << 30, 8 << 30, reason=problem)
        record_sight(node.pk, StoreSight(1, problem=problem, held=(held,)), names={}, now=NOW)
    for address in (reverse("weights"), reverse("weights_now")):
        page = operator.get(address).content.decode()
        assert "1\u201350 of 60" in page
        disks = page[page.index("<h2>Disks</h2>") :]
        assert disks.index("many-059") < disks.index("many-000")
        assert "many-057" not in disks
        assert "many-057" in operator.get(address, {"page": 2}).content.decode()
    second = operator.get(reverse("weights"), {"page": 2}).content.decode()
    assert f'hx-get="{reverse("weights_now")}?page=2"' in second, "what is renewed stays on its page"
    nodes = operator.get(reverse("weights_of_model", args=[model.pk])).content.decode()
    assert f'href="{reverse("weights_of_model", args=[model.pk])}?page=2"' in nodes
    nodes = nodes[nodes.index('id="weights-nodes"') :]
    assert "1\u201350 of 60" in nodes
    assert nodes.index("many-059</a>") < nodes.index("many-000</a>")


def test_peers_are_told_by_name_and_many_by_number() -> None:
    row = NodeRow(uuid4(), "n", simulated=False, sources={"http store": 5, "peer node-a": 3, "peer b": 4})
    mix = mix_of(row)
    assert mix.parts == (("http store", 5), ("2 peers", 7))
    assert mix.peers.startswith("node-a 3")
    assert mix_of(replace(row, sources={"peer a": 3})).parts == (("peer a", 3),)


def test_live_telemetry_of_a_node_is_read_once_for_all_models() -> None:
    asked: list[list[str]] = []

    def read(node_ids: Collection[str]) -> dict[str, dict[str, int]]:
        asked.append(sorted(node_ids))
        return {node_id: {"at": 1} for node_id in node_ids if node_id != "silent"}

    live = LiveOnce(read)
    assert live(["a", "silent"]) == {"a": {"at": 1}}
    assert live(["a", "b", "silent"]) == {"a": {"at": 1}, "b": {"at": 1}}
    assert asked == [["a", "silent"], ["b"]]


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"begin": "late"}, "begin", "Enter a valid time."),
        ({"megabytes_per_second": 2**44}, "megabytes_per_second", "less than or equal to 1000000000"),
        ({"megabytes_per_second": 0.5}, "megabytes_per_second", "must be 0, or 1,000,000 to"),
        ({"at_once": 2**31}, "at_once", "less than or equal to 4096"),
        ({"nodes": "nobody"}, "nodes", "no node in service is named nobody"),
    ],
)
def test_rules_that_make_no_sense_are_refused_beside_their_field_and_nothing_typed_is_lost(
    operator: Client, model: Model, changes: dict[str, object], field: str, said: str
) -> None:
    rules = {
        "nodes": "",
        "begin": "22:00",
        "end": "06:30",
        "busiest_percent": 40,
        "megabytes_per_second": 200,
        "at_once": 3,
        "reason": "nights, quietly",
    }
    answer = operator.post(reverse("weights_prewarm", args=[model.pk]), rules | changes)
    assert answer.status_code == 422
    assert said in answer.context["prewarm_form"].errors[field][0]
    text = answer.content.decode()
    assert 'value="nights, quietly"' in text
    assert "* begin" not in text
    assert not PrewarmPolicy.objects.exists()


def test_refused_storage_and_compiled_folders_are_said_once_escaped_beside_their_field(
    operator: Client, model: Model
) -> None:
    asked = {"storage": "node", "reason": "x", "origins": "it's-one-word"}
    storage = operator.post(reverse("weights_storage", args=[model.pk]), asked)
    assert storage.status_code == 422
    assert "it&#x27;s-one-word" in storage.content.decode()
    assert "&amp;#x27;" not in storage.content.decode()
    folder = {"engine": "", "path": "/nowhere", "reason": "typed"}
    compiled = operator.post(reverse("weights_compiled", args=[model.pk]), folder)
    assert compiled.status_code == 422
    assert compiled.context["compiled_form"].errors["engine"]
    assert 'value="/nowhere"' in compiled.content.decode()
