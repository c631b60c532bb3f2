"""Claims on weights reach nodes as one wish, and what nodes say of them is on record."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
import redis

from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.audit.models import Event
from exaserve_ops.controllers import weights as keeper
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.models import Model, Replica
from exaserve_ops.serving.selectors import wanted_of_node
from exaserve_ops.serving.selectors.weights import model_weights_on
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment
from exaserve_ops.serving.services.models import register_model
from exaserve_ops.serving.services.weights import change_storage, pause_weights, release_weights, want_weights
from exaserve_ops.weights.domain.wanted import Origin
from exaserve_ops.weights.models import NodeWeights
from tests.fakes.fleet import NOW, ScriptedNode
from tests.fakes.leader import Leader
from tests.fakes.world import GIB, make_model
from workers.engines.demo_model import make_demo_model
from workers.protocol import manifest, v1
from workers.protocol.weights import WeightsHeld, WeightsReport, WeightsState, WeightsWanted

pytestmark = pytest.mark.django_db
OWNER = "rollout:7"


@pytest.fixture
def model(tmp_path: Path) -> Model:
    make_demo_model(tmp_path / "demo", seed=0)
    facts = ModelFolder().read(str(tmp_path / "demo"))
    model = register_model(name="demo", facts=facts, actor="test", now=NOW)
    return change_storage(model.pk, storage="node", actor="test", now=NOW)


def told(leader: Leader, node: ScriptedNode, *held: WeightsHeld, revision: int = 0) -> list[v1.ApplyWeights]:
    """What the node is told after it reported these weights."""
    node.beat(weights=WeightsReport(revision=revision, disk_total_bytes=1000, held=held))
    leader.work()
    leader.weights.step()
    return [command for command in node.commands() if isinstance(command, v1.ApplyWeights)]


def want(model: Model, node: ScriptedNode, owner: str = OWNER) -> int:
    return want_weights(model.pk, [UUID(node.node_id)], owner=owner, actor="test", now=NOW, reason="wave 1")


def test_a_claim_reaches_its_node_with_a_manifest_that_it_can_read(
    leader: Leader, node: ScriptedNode, model: Model, redis_client: redis.Redis
) -> None:
    assert want(model, node) == 1
    (command,) = told(leader, node)
    (wanted,) = command.weights
    data = redis_client.get(manifest.key_of(wanted.manifest_digest))
    assert manifest.decode(data, wanted.manifest_digest).revision == wanted.revision == model.digest
    assert (wanted.sources[0].kind, wanted.sources[0].location) == ("folder", model.source)
    assert wanted.total_bytes == manifest.decode(data, wanted.manifest_digest).total_bytes
    # Once it has taken it in, nothing is said again.
    assert told(leader, node, revision=command.revision) == []


def test_what_redis_lost_is_laid_out_again(
    leader: Leader, node: ScriptedNode, model: Model, redis_client: redis.Redis
) -> None:
    want(model, node)
    told(leader, node)
    redis_client.delete(manifest.key_of(model.manifest.digest))
    leader.weights.step()
    assert redis_client.exists(manifest.key_of(model.manifest.digest))


def test_a_node_that_was_told_before_its_agent_lost_it_is_told_again(
    leader: Leader, node: ScriptedNode, model: Model
) -> None:
    want(model, node)
    (first,) = told(leader, node)
    leader.weights._told[node.node_id].sent_seconds -= 60
    (again,) = told(leader, node)
    assert (again.revision, again.weights) == (first.revision, first.weights)


def test_states_are_recorded_with_one_event_each_and_answer_whether_a_replica_could_start(
    leader: Leader, node: ScriptedNode, model: Model
) -> None:
    want(model, node)
    node_id = UUID(node.node_id)
    assert model_weights_on(model.pk, [node_id])[node_id].state == "absent"
    fetching = WeightsHeld(revision=model.digest, state=WeightsState.FETCHING, total_bytes=10, have_bytes=3)
    told(leader, node, fetching)
    seen = model_weights_on(model.pk, [node_id])[node_id]
    assert (seen.state, seen.ready, seen.have_bytes, seen.total_bytes) == ("fetching", False, 3, 10)
    for _ in range(3):
        told(leader, node, WeightsHeld(revision=model.digest, state=WeightsState.READY, have_bytes=10))
    assert model_weights_on(model.pk, [node_id])[node_id].ready
    told(leader, node, WeightsHeld(revision=model.digest, state=WeightsState.FAILED, reason="disk full"))
    told(leader, node)
    assert model_weights_on(model.pk, [node_id])[node_id].state == "absent"
    events = list(
        Event.objects.filter(event__startswith="weights_").order_by("pk").values_list("event", flat=True)
    )
    assert events == ["weights_claimed", "weights_ready", "weights_failed"]


def test_owners_do_not_see_one_anothers_claims(leader: Leader, node: ScriptedNode, model: Model) -> None:
    want(model, node)
    want(model, node, "person")
    assert want(model, node) == 0, "claimed already"
    (command,) = told(leader, node)
    assert command.weights[0].priority == 50
    assert release_weights(model.pk, owner=OWNER, actor="test", now=NOW) == 1
    (command,) = told(leader, node)
    assert command.weights[0].priority == 20
    pause_weights(model.pk, owner="person", paused=True, actor="test", now=NOW)
    (command,) = told(leader, node)
    assert command.weights[0].paused
    release_weights(model.pk, owner="person", actor="test", now=NOW)
    (command,) = told(leader, node)
    assert command.weights == ()


def test_replicas_of_a_stored_model_are_told_its_manifest_and_their_node_its_weights(
    leader: Leader, node: ScriptedNode, model: Model
) -> None:
    wish = DeploymentWish(
        name="d", model_id=model.pk, replicas=1, engine="simulated", replica_memory_bytes=GIB
    )
    create_deployment(wish, actor="test", now=NOW)
    leader.work()
    leader.work()
    (replica,) = wanted_of_node(UUID(node.node_id))
    assert replica.manifest_digest == model.manifest.digest
    node.commands()
    (command,) = told(leader, node)
    assert [(w.revision, w.priority) for w in command.weights] == [(model.digest, 100)]
    assert Replica.objects.exists()
    with pytest.raises(ConflictError, match="replicas of 'demo' live"):
        change_storage(model.pk, storage="in_place", actor="test", now=NOW)


def test_a_model_in_place_needs_nothing_on_nodes(leader: Leader, node: ScriptedNode, model: Model) -> None:
    change_storage(model.pk, storage="in_place", actor="test", now=NOW)
    assert want(model, node) == 0
    assert told(leader, node) == []
    assert model_weights_on(model.pk, [UUID(node.node_id)])[UUID(node.node_id)].ready


def test_a_model_without_a_manifest_is_not_stored_on_nodes(node: ScriptedNode) -> None:
    bare = make_model("bare")
    with pytest.raises(ConflictError, match="no manifest"):
        change_storage(bare.pk, storage="node", actor="test", now=NOW)
    with pytest.raises(ConflictError, match="no manifest"):
        want(bare, node, "person")


@pytest.mark.parametrize(
    "origin",
    [
        Origin("ftp", "ftp://host/x"),
        Origin("http", "file:///x"),
        Origin("http", "https://user:password@host/x"),
        Origin("http", "https://host/x?token=abc"),
        Origin("http", "https:///x"),
        Origin("http", "https://host:port/x"),
        Origin("http", "https://host"),
        Origin("folder", "file://host/x"),
        Origin("folder", "/x"),
        Origin("s3", "s3://bucket"),
        Origin("hub", "https://hub/x", secret="../../etc/passwd"),
        Origin("hub", "https://hub/x", secret=".hidden"),
    ],
)
def test_an_origin_that_no_node_could_use_or_that_holds_a_secret_is_refused(
    model: Model, origin: Origin
) -> None:
    with pytest.raises(InvalidInputError):
        change_storage(model.pk, storage="node", origins=[origin], actor="test", now=NOW)


def test_origins_are_told_in_their_order(leader: Leader, node: ScriptedNode, model: Model) -> None:
    places = [Origin("s3", "s3://bucket/models/demo", "store"), Origin("hub", "https://hub/a/b/resolve/c")]
    change_storage(model.pk, storage="node", origins=places, actor="test", now=NOW)
    want(model, node)
    wanted: WeightsWanted = told(leader, node)[0].weights[0]
    assert [(s.kind, s.location, s.secret) for s in wanted.sources] == [
        (p.kind, p.location, p.secret) for p in places
    ]


def test_one_report_that_no_record_can_hold_hides_no_other(
    leader: Leader, node: ScriptedNode, model: Model, redis_client: redis.Redis
) -> None:
    other = ScriptedNode(redis_client, name="node-b", boot_id="boot-b")
    other.enrol()
    other.say_hello()
    leader.work()
    odd = WeightsHeld(revision=model.digest, state=WeightsState.FAILED, reason="a \x00 in it", wanted=True)
    good = WeightsHeld(revision=model.digest, state=WeightsState.READY, total_bytes=5, have_bytes=5)
    other.beat(weights=WeightsReport(held=(odd,)))
    told(leader, node, good)
    rows = NodeWeights.objects.values_list("node", "state")
    assert list(rows) == [(UUID(node.node_id), "ready")]


def test_progress_is_written_down_now_and_then_and_states_at_once(
    leader: Leader, node: ScriptedNode, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "PROGRESS_EVERY_SECONDS", float("inf"))

    def seen(state: WeightsState, gibibytes: int) -> tuple[str, int]:
        told(
            leader,
            node,
            WeightsHeld(revision=model.digest, state=state, total_bytes=9 * GIB, have_bytes=gibibytes * GIB),
        )
        row = NodeWeights.objects.get()
        return row.state, row.have_bytes // GIB

    assert seen(WeightsState.FETCHING, 1) == ("fetching", 1)
    assert seen(WeightsState.FETCHING, 4) == ("fetching", 1)
    monkeypatch.setattr(keeper, "PROGRESS_EVERY_SECONDS", 0.0)
    assert seen(WeightsState.FETCHING, 5) == ("fetching", 5)
    monkeypatch.setattr(keeper, "PROGRESS_EVERY_SECONDS", float("inf"))
    assert seen(WeightsState.READY, 9) == ("ready", 9)
