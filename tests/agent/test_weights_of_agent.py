"""Replicas start from their node's own copy of the weights, and never from anything less."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from exaserve_ops.adapters.store_users import RedisStoreUsers
from tests.fakes.node import Node, make_home, make_spec, wait_for
from tests.fakes.valkey import Valkey, running_valkey
from tests.fakes.weight_servers import FileServer, serving
from tests.fakes.weights import PIECE, Weights, folder_source, made_weights
from workers.agent.home import Home
from workers.protocol import manifest, store_user, v1
from workers.protocol.observed import ObservedState
from workers.protocol.weights import WeightsHeld, WeightsSource, WeightsState, WeightsWanted
from workers.protocol.wish import ModelRef, ReplicaSpec, WantedState

SETTINGS = {"EXAOPS_AGENT_WEIGHTS_MARGIN_BYTES": "0", "EXAOPS_AGENT_WEIGHTS_LOCAL_SOURCES": "true"}


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path, valkey: Valkey) -> Home:
    """A home whose node may do in Redis what nodes may, and nothing else."""
    home = make_home(tmp_path / "home", valkey.url)
    identity = home.load_identity()
    RedisStoreUsers(valkey.client()).admit(identity.node_id, identity.key)
    own = store_user.url_for(valkey.url, identity.node_id, identity.key)
    home.save_identity(msgspec.structs.replace(identity, redis_url=own))
    return home


@pytest.fixture
def node(home: Home, valkey: Valkey) -> Iterator[Node]:
    node = Node(home, valkey, SETTINGS)
    node.start()
    try:
        yield node
    finally:
        node.close()


@pytest.fixture
def weights(valkey: Valkey) -> Weights:
    weights = made_weights(shards=3)
    with valkey.client() as client:
        client.set(manifest.key_of(weights.digest), weights.body)
    return weights


def tell(node: Node, *wanted: WeightsWanted, revision: int = 1, epoch: int = 1) -> None:
    command = v1.ApplyWeights(
        command_id=str(uuid.uuid4()),
        lease_epoch=epoch,
        deadline_seconds=60,
        revision=revision,
        weights=wanted,
    )
    node.send(command)


def spec_of(weights: Weights, replica_id: str, **changes: object) -> ReplicaSpec:
    model = ModelRef(
        name="m", digest=weights.revision, source="file:///nowhere", manifest_digest=weights.digest
    )
    return make_spec(replica_id, model=model, **changes)


def held(node: Node, weights: Weights) -> WeightsHeld | None:
    beat = node.heartbeat()
    report = beat.weights if beat is not None else None
    return next((one for one in (report.held if report else ()) if one.revision == weights.revision), None)


def wait_held(node: Node, weights: Weights, state: WeightsState) -> WeightsHeld:
    def found() -> WeightsHeld | None:
        one = held(node, weights)
        return one if one is not None and one.state is state else None

    return wait_for(found, f"{state}; now {held(node, weights)}")


def test_replicas_wait_for_their_weights_and_start_from_the_nodes_own_copy(
    node: Node, weights: Weights, tmp_path: Path
) -> None:
    node.wish(spec_of(weights, "r1"), spec_of(weights, "r2"))
    waiting = node.wait_state("r1", ObservedState.WAITING)
    assert "not named them yet" in waiting.reason or "not open" in waiting.reason
    tell(node, weights.wanted(folder_source(weights.write_to(tmp_path / "origin"))))
    for replica_id in ("r1", "r2"):
        seen = node.wait_state(replica_id, ObservedState.READY)
        assert seen.pid is not None
        model_dir = Path(psutil.Process(seen.pid).environ()["TINY_MODEL"])
        assert model_dir == node.home.weight_store / "ready" / weights.revision.removeprefix("sha256:")
        assert {p.name for p in model_dir.iterdir()} >= {"config.json", "model.safetensors.index.json"}
    wait_for(lambda: getattr(held(node, weights), "in_use", False), "use to be told")


def test_an_agent_that_is_killed_while_it_fetches_goes_on_and_nothing_is_launched_before(
    node: Node, weights: Weights
) -> None:
    server = FileServer({f"m/{path}": content for path, content in weights.contents.items()})
    with serving(server):
        wanted = weights.wanted(
            WeightsSource(kind="http", location=f"{server.address}/m"),
            bytes_per_second=40_000.0,  # 40 s for all of it: longer than an agent takes to start again
            priority=100,
        )
        node.wish(spec_of(weights, "r1"))
        tell(node, wanted)
        wait_for(lambda: getattr(held(node, weights), "have_bytes", 0) >= 2 * PIECE, "some pieces")
        seen = node.replica("r1")
        assert seen is not None
        assert seen.state is ObservedState.WAITING
        assert "fetching" in seen.reason
        node.signal(signal.SIGKILL)
        node.forget_reports()
        node.start()
        # Told nothing anew: it goes on with what it was told.
        wait_held(node, weights, WeightsState.FETCHING)
        # It looks through what is there before it counts it.
        wait_for(lambda: getattr(held(node, weights), "have_bytes", 0) >= 2 * PIECE, "what it had")
        tell(node, weights.wanted(*wanted.sources, priority=100), revision=2)
        node.wait_state("r1", ObservedState.READY, seconds=60.0)


def test_weights_that_cannot_be_had_keep_a_replica_waiting_with_the_reason(
    node: Node, weights: Weights, tmp_path: Path
) -> None:
    node.wish(spec_of(weights, "r1"))
    tell(node, weights.wanted(folder_source(tmp_path / "nowhere")))
    wait_held(node, weights, WeightsState.FAILED)
    wait_for(lambda: "does not exist" in getattr(node.replica("r1"), "reason", ""), "the reason")
    seen = node.replica("r1")
    assert seen is not None
    assert (seen.state, seen.attempt) == (ObservedState.WAITING, 0)
    # A source that has them mends it, with no new generation and nobody's help.
    tell(node, weights.wanted(folder_source(weights.write_to(tmp_path / "origin"))), revision=2)
    node.wait_state("r1", ObservedState.READY)
    node.wish(spec_of(weights, "r1", generation=2, wanted=WantedState.STOP))
    node.wait_state("r1", ObservedState.STOPPED)


def test_an_older_wish_for_weights_is_passed_over_but_not_under_a_newer_lease(
    node: Node, weights: Weights, tmp_path: Path
) -> None:
    place = folder_source(weights.write_to(tmp_path / "origin"))
    tell(node, weights.wanted(place), revision=7)
    wait_held(node, weights, WeightsState.READY)
    tell(node, revision=6)
    tell(node, weights.wanted(place, name="later"), revision=8)

    def revision() -> int:
        beat = node.heartbeat()
        return beat.weights.revision if beat is not None and beat.weights is not None else 0

    wait_for(lambda: revision() == 8, "revision 8")
    tell(node, revision=1, epoch=2)
    wait_for(lambda: revision() == 1, "the wish of a new lease")
    wait_for(lambda: not getattr(held(node, weights), "wanted", True), "nobody to want it")
