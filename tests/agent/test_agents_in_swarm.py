"""Two real agents in one swarm: what one has verified the other gets from it, and one of them may die."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.node import Node, make_home, wait_for
from tests.fakes.valkey import Valkey, running_valkey
from tests.fakes.weights import PIECE, Weights, folder_source, made_weights
from workers.protocol import manifest, v1
from workers.protocol.weights import (
    SwarmOrder,
    SwarmParent,
    WeightsHeld,
    WeightsReport,
    WeightsSource,
    WeightsState,
    WeightsWanted,
)

ORIGIN = SwarmParent(node_id="origin")


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
def agents(tmp_path: Path, valkey: Valkey) -> Iterator[list[Node]]:
    nodes = [
        Node(make_home(tmp_path / name, valkey.url), valkey, {"EXAOPS_AGENT_WEIGHTS_MARGIN_BYTES": "0"})
        for name in ("a", "b")
    ]
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.close()


@pytest.fixture
def weights(valkey: Valkey) -> Weights:
    weights = made_weights(shards=2, shard_bytes=30 * PIECE)
    with valkey.client() as client:
        client.set(manifest.key_of(weights.digest), weights.body)
    return weights


def tell(node: Node, wanted: WeightsWanted, revision: int) -> None:
    node.send(
        v1.ApplyWeights(
            command_id=str(uuid.uuid4()),
            lease_epoch=1,
            deadline_seconds=60,
            revision=revision,
            weights=(wanted,),
        )
    )


def report(node: Node) -> WeightsReport:
    beat = wait_for(node.heartbeat, "a heartbeat")
    assert beat.weights is not None
    return beat.weights


def held(node: Node, weights: Weights) -> WeightsHeld | None:
    return next((one for one in report(node).held if one.revision == weights.revision), None)


def ready(node: Node, weights: Weights) -> WeightsHeld | None:
    one = held(node, weights)
    return one if one is not None and one.state is WeightsState.READY else None


def order(*stripes: tuple[SwarmParent, ...]) -> SwarmOrder:
    return SwarmOrder(epoch=7, key="4d" * 32, valid_seconds=600.0, stripes=stripes)


def as_parent(node: Node) -> SwarmParent:
    port = wait_for(lambda: report(node).piece_port, "a port")
    return SwarmParent(node_id=node.node_id, host="127.0.0.1", port=port)


def test_agents_in_a_swarm_listen_for_pieces_on_their_own_address_alone(
    agents: list[Node], weights: Weights
) -> None:
    for node in agents:
        wait_for(lambda: report(node).in_swarms, "its store to be open")  # noqa: B023 - waited for at once
        assert report(node).piece_port == 0
        tell(node, weights.wanted(swarm=order()), 1)
    ports = {as_parent(node).port for node in agents}
    assert len(ports) == 2
    listening = {
        (c.laddr.ip, c.laddr.port)
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port in ports
    }
    assert listening == {("127.0.0.1", port) for port in ports}


def test_one_agent_gives_to_the_other_and_a_killed_one_is_waited_for(
    agents: list[Node], weights: Weights, tmp_path: Path
) -> None:
    first, second = agents
    origin = folder_source(weights.write_to(tmp_path / "origin"))
    nowhere = WeightsSource(kind="folder", location=(tmp_path / "nowhere").as_uri())
    tell(first, weights.wanted(origin, swarm=order((ORIGIN,)), bytes_per_second=1e6), 1)
    tell(second, weights.wanted(nowhere, swarm=order((as_parent(first),))), 1)
    wait_for(lambda: getattr(held(second, weights), "have_bytes", 0) > 2 * PIECE, "pieces from the other")
    first.signal(signal.SIGKILL)
    first.forget_reports()
    first.start()
    again = as_parent(first)
    tell(first, weights.wanted(origin, swarm=order((ORIGIN,))), 2)
    tell(second, weights.wanted(nowhere, swarm=order((again,))), 2)
    for node in agents:
        wait_for(lambda: ready(node, weights), "weights on both")  # noqa: B023 - waited for at once
    came = ready(second, weights)
    assert came is not None
    assert {source.kind for source in came.sources} == {"peer"}
