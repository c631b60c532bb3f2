"""What was compiled goes to nodes that have its model and its hardware, behind what replicas wait for."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
import redis

from exaserve_ops.adapters.compiled_folder import CompiledFolder
from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.inventory.models import Accelerator
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.services.compiled import register_compiled, remove_compiled
from exaserve_ops.serving.services.models import register_model
from exaserve_ops.serving.services.weights import release_weights, want_weights
from tests.fakes.fleet import NOW, ScriptedNode
from tests.fakes.leader import Leader
from workers.engines.demo_model import make_demo_model
from workers.protocol import manifest, v1
from workers.protocol.weights import WeightsReport, WeightsWanted

pytestmark = pytest.mark.django_db


@pytest.fixture
def model(tmp_path: Path) -> Model:
    make_demo_model(tmp_path / "demo", seed=0)
    facts = ModelFolder().read(str(tmp_path / "demo"))
    return register_model(name="demo", facts=facts, actor="test", now=NOW)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "cache" / "inductor").mkdir(parents=True)
    (tmp_path / "cache" / "inductor" / "kernel.so").write_bytes(b"code")
    return tmp_path / "cache"


@pytest.fixture
def node(redis_client: redis.Redis, leader: Leader) -> ScriptedNode:
    node = ScriptedNode(redis_client)
    node.enrol()
    node.say_hello()
    leader.work()
    node.commands()
    return node


def register(model: Model, folder: Path, *, hardware: str) -> UUID:
    facts = CompiledFolder((folder.parent,)).read(str(folder))
    return register_compiled(model.pk, facts, engine="torch", hardware=hardware, actor="test", now=NOW).pk


def told(leader: Leader, node: ScriptedNode) -> list[WeightsWanted] | None:
    """What the node is told next; `None`: nothing new."""
    node.beat(weights=WeightsReport(disk_total_bytes=1000))
    leader.work()
    leader.weights.step()
    orders = [c for c in node.commands() if isinstance(c, v1.ApplyWeights)]
    return list(orders[-1].weights) if orders else None


def test_a_node_with_the_model_and_the_hardware_is_told_of_it_and_can_read_its_manifest(
    leader: Leader, node: ScriptedNode, model: Model, cache: Path, redis_client: redis.Redis
) -> None:
    compiled = register(model, cache, hardware="cpu")
    assert told(leader, node) is None, "it does not have the model"
    want_weights(model.pk, [UUID(node.node_id)], owner="person", actor="test", now=NOW)
    weights, files = sorted(told(leader, node) or (), key=lambda one: one.engine_cache)
    assert (weights.engine_cache, weights.revision) == ("", model.digest)
    assert (files.engine_cache, files.total_bytes) == ("torch", 4)
    assert files.sources[0].location == cache.as_uri()
    body = redis_client.get(manifest.key_of(files.manifest_digest))
    assert isinstance(body, bytes)
    assert [file.path for file in manifest.decode(body, files.manifest_digest).files] == [
        "inductor/kernel.so"
    ]
    remove_compiled(model.pk, compiled, actor="test", now=NOW)
    assert [one.revision for one in told(leader, node) or ()] == [model.digest]


def test_a_node_with_other_hardware_is_not_told_and_one_whose_claim_ends_is_told_no_more(
    leader: Leader, node: ScriptedNode, model: Model, cache: Path
) -> None:
    register(model, cache, hardware="NVIDIA H200")
    want_weights(model.pk, [UUID(node.node_id)], owner="person", actor="test", now=NOW)
    assert [one.engine_cache for one in told(leader, node) or ()] == [""]
    Accelerator.objects.filter(node=node.node_id).update(name="NVIDIA H200")
    assert sorted(one.engine_cache for one in told(leader, node) or ()) == ["", "torch"]
    release_weights(model.pk, owner="person", actor="test", now=NOW)
    assert told(leader, node) == []


def test_what_replicas_wait_for_is_fetched_first(
    leader: Leader, node: ScriptedNode, model: Model, cache: Path
) -> None:
    register(model, cache, hardware="")
    want_weights(model.pk, [UUID(node.node_id)], owner="person", actor="test", now=NOW)
    priorities = {one.engine_cache: one.priority for one in told(leader, node) or ()}
    assert priorities == {"": 20, "torch": 90}
