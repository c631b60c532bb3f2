"""What a deployment of replicas over several nodes may ask for, and what it is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from exaserve_ops.inventory.domain.facts import AcceleratorFacts, Endpoint, Link, NodeFacts, Topology
from exaserve_ops.inventory.models import Accelerator, Node
from exaserve_ops.inventory.services import record_hello
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.placement import Placement, place_gang
from exaserve_ops.serving.domain.rooms import NodeRoom, PlacementRequest
from exaserve_ops.serving.domain.spread import view_spread
from exaserve_ops.serving.domain.starts import Starter, StartFacts, StartLimits, StartNode, plan_starts
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.selectors import deployment_snapshot, node_rooms
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment, update_deployment
from exaserve_ops.serving.services.options import check_options
from exaserve_ops.serving.services.releases import ReleaseWish, find_or_create_release
from tests.fakes.world import GIB, NOW, make_model, make_node


def wide(**changes: Any) -> Deployment:
    fields: dict[str, Any] = {
        "name": "wide", "replicas": 1, "engine": "torch", "engine_options": {"pipeline_stages": 2},
        "replica_memory_bytes": GIB, "nodes_per_replica": 2,
    }  # fmt: skip
    if "model_id" not in changes:
        fields["model_id"] = make_model().pk
    wish = DeploymentWish(**(fields | changes))
    return create_deployment(wish, actor="test", now=NOW)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        (
            {"nodes_per_replica": 3},
            "nodes_per_replica",
            "3 nodes with 1 each have 3: pipeline_stages = 3, or change how many",
        ),
        (
            {"nodes_per_replica": 1},
            "nodes_per_replica",
            "pipeline_stages 2 takes 2 for each replica, not 1: give 2, or pipeline_stages = 1",
        ),
        ({"accelerators_per_replica": 2}, "nodes_per_replica", "2 nodes with 2 each have 4"),
        ({"nodes_per_replica": 0}, "nodes_per_replica", "a whole number from 1 to 64"),
        ({"nodes_per_replica": 65}, "nodes_per_replica", "a whole number from 1 to 64"),
        ({"engine": "other", "engine_options": {}}, "nodes_per_replica", "runs on one node; what"),
        ({"accelerator": "slice"}, "accelerator", "takes whole accelerators"),
        ({"mps_thread_percent": 50}, "mps_thread_percent", "takes whole accelerators"),
        ({"nodes": ("n0",)}, "nodes", "each replica takes 2 nodes, and only 1 may be used"),
    ],
)
@pytest.mark.django_db
def test_parts_that_make_up_no_replica_are_refused_with_the_numbers(
    changes: dict[str, Any], field: str, words: str
) -> None:
    make_node("n0")
    Node.objects.update(engines=["torch", "other"])
    with pytest.raises(InvalidInputError, match=words) as refused:
        wide(**changes)
    assert refused.value.field == field
    assert not Deployment.objects.exists()


STAGES_OF_THREE = {"engine_options": {"pipeline_stages": 3}, "nodes_per_replica": 3}


@pytest.mark.django_db
def test_more_stages_than_the_model_has_layers_are_refused_with_their_number() -> None:
    with pytest.raises(InvalidInputError, match="tiny has 2 layers, and each stage needs one") as refused:
        wide(**STAGES_OF_THREE)
    assert refused.value.field == "engine_options.pipeline_stages"
    assert not Deployment.objects.exists()


@pytest.mark.parametrize("facts", ["recorded", "config"])
@pytest.mark.django_db
def test_release_of_a_model_with_fewer_layers_than_stages_is_refused(facts: str) -> None:
    deployment = wide()
    shallow = make_model("shallow")
    if facts == "recorded":
        shallow.architecture = {**shallow.architecture, "layers": 1}
    else:
        shallow.architecture, shallow.config = {}, {**shallow.planning_config, "num_hidden_layers": 1}
    shallow.save()
    with pytest.raises(InvalidInputError, match="shallow has 1 layer, and each stage needs one"):
        find_or_create_release(deployment.pk, ReleaseWish(model_id=shallow.pk), actor="test", now=NOW)
    assert deployment.releases.count() == 1


@pytest.mark.django_db
def test_stages_of_a_model_whose_layers_nobody_knows_are_taken() -> None:
    model = make_model("opaque")
    model.architecture, model.config = {}, {}
    model.save()
    assert wide(model_id=model.pk, **STAGES_OF_THREE).nodes_per_replica == 3


@pytest.mark.django_db
def test_ranks_that_cannot_share_the_heads_are_refused_with_sizes_that_fit() -> None:
    for name in ("n0", "n1", "n2"):
        make_node(name)
    Node.objects.update(engines=["torch", "vllm", "sglang"])
    three: dict[str, Any] = {"nodes_per_replica": 3}
    with pytest.raises(InvalidInputError, match=r"tiny has 4 attention heads .* give 1, 2 or 4") as refused:
        wide(engine="vllm", engine_options={"tensor_parallel_size": 3}, **three)
    assert refused.value.field == "engine_options.tensor_parallel_size"
    assert not Deployment.objects.exists()
    latent = make_model("latent")
    latent.config = {**latent.planning_config, "num_key_value_heads": 3, "kv_lora_rank": 512}
    latent.save()
    wide(name="mla", model_id=latent.pk, engine="vllm", engine_options={"tensor_parallel_size": 2})
    on_cards = {"engine": "sglang", "engine_options": {"tp_size": 3}, "model_id": latent.pk, **three}
    with pytest.raises(InvalidInputError, match="latent has 4 attention heads, which 3 ranks"):
        wide(**on_cards)
    Accelerator.objects.filter(node__name="n0").update(kind="cpu")
    assert wide(**on_cards).nodes_per_replica == 3, "SGLang fills heads up on processors"


@pytest.mark.django_db
def test_copies_within_a_replica_of_vllm_are_refused_on_several_nodes() -> None:
    options = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    with pytest.raises(InvalidInputError, match="leave it out, and have more replicas"):
        check_options("vllm", options, 2, nodes=2)
    check_options("vllm", {"tensor_parallel_size": 8, "pipeline_parallel_size": 4}, 8, nodes=4)
    check_options("sglang", {"tp_size": 8, "pp_size": 4}, 8, nodes=4)


@pytest.mark.django_db
def test_nodes_may_not_become_too_few_later() -> None:
    for name in ("n0", "n1"):
        make_node(name)
    made = wide(nodes=("n0", "n1"))
    with pytest.raises(InvalidInputError, match="only 1 may be used"):
        update_deployment(made.pk, {"nodes": ("n0",)}, actor="test", now=NOW)


@pytest.mark.django_db
def test_no_part_goes_to_an_agent_that_would_run_it_as_a_whole() -> None:
    for name in ("n0", "n1"):
        make_node(name, supernode="s1")
    Node.objects.filter(name="n1").update(protocol_minor=6)
    made = wide()
    snapshot = deployment_snapshot(made.pk, active_sessions={}, now=NOW)
    assert snapshot is not None
    refusal = place_gang(snapshot.request, node_rooms(made.pk, now=NOW))
    assert not isinstance(refusal, Placement)
    assert "1 of 2 nodes free in supernode s1" in refusal.summary()
    assert "its agent speaks 1.6, and parts need 1.7: update it" in refusal.summary()


@pytest.mark.django_db
def test_plan_places_all_members_and_cards_lie_by_their_adapters_as_the_node_told() -> None:
    for name in ("n0", "n1"):
        node = make_node(name, accelerators=3, supernode="s1")
        cards = [f"GPU-{name}-{i}" for i in range(3)]
        ends = (*(Endpoint(card, accelerator=True) for card in cards), Endpoint("mlx5_0", accelerator=False))
        links = (Link(0, 1, "SYS", 5), Link(0, 2, "SYS", 5), Link(1, 2, "NV4", 0), Link(2, 3, "PIX", 1))
        facts = NodeFacts(
            hostname=name, address="10.0.0.1", agent_version="1", protocol_minor=7, boot_id="b1",
            engines=("vllm",), labels={"supernode": "s1"}, topology=Topology(ends, links),
        )  # fmt: skip
        _say_hello_again(node.pk, facts)
    made = wide(engine="vllm", engine_options={"tensor_parallel_size": 4}, accelerators_per_replica=2)
    snapshot = deployment_snapshot(made.pk, active_sessions={}, now=NOW)
    assert snapshot is not None
    choice = place_gang(snapshot.request, node_rooms(made.pk, now=NOW))
    assert isinstance(choice, Placement), choice
    assert choice.where == "n0, n1"
    assert [member.accelerator_uuids for member in choice.members] == [
        (f"GPU-{name}-1", f"GPU-{name}-2") for name in ("n0", "n1")
    ]
    assert choice.members[0].adapters == ("", "mlx5_0")


def _say_hello_again(node_id: Any, facts: NodeFacts) -> None:
    cards = tuple(AcceleratorFacts(f"GPU-{facts.hostname}-{i}", "cuda", "H200", 8 * GIB, i) for i in range(3))
    record_hello(node_id, replace(facts, accelerators=cards), now=NOW)


def test_it_waits_for_its_turn_on_every_node_and_takes_one_on_each() -> None:
    nodes = {name: StartNode(name) for name in ("a", "b", "c")}

    def starter(name: str, *where: str) -> Starter:
        return Starter(name, name, "d", where[0], "w", "placed", NOW, NOW, in_place=True, others=where[1:])

    limits = StartLimits(per_node=1, in_place=0)
    facts = StartFacts(
        (starter("r1", "a", "b"), starter("r2", "b", "c"), starter("r3", "c")), nodes, limits=limits
    )
    plan = plan_starts(facts, now=NOW + timedelta(seconds=1))
    assert plan.go == ("r1", "r3")
    assert [(one.replica_id, one.why) for one in plan.waits] == [
        ("r2", "waits its turn: 1 of 1 start on b"),
    ]


@pytest.mark.django_db
def test_supernode_named_later_is_taken_for_a_rack_that_was_known_without() -> None:
    make_node("n0")
    make_node("n1", supernode="s1")
    made = wide()
    assert {room.supernode for room in node_rooms(made.pk, now=NOW)} == {"s1"}


def test_loss_of_a_domain_counts_a_replica_over_several_nodes_once() -> None:
    def room(name: str, rack: str, *parts: str) -> NodeRoom:
        here, accepts = frozenset(parts), True
        return NodeRoom(name, name, accepts, "", frozenset(), rack, (), len(parts), 1, parts_of=here)

    rooms = [room("a", "r1", "x"), room("b", "r1", "x"), room("c", "r2", "y"), room("d", "r3", "y")]
    view = view_spread(rooms, PlacementRequest("vllm", 1, nodes_per_replica=2))
    lost = {(loss.kind, loss.name): (loss.serving, loss.lost_ratio) for loss in view.losses}
    assert lost["rack", "r1"] == lost["rack", "r2"] == lost["node", "b"] == (1, 0.5)
    assert view.advice == ()
