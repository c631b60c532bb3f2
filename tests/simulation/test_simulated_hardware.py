"""A simulated node's hardware looks as the probes tell of real ones: links, and cards cut into slices."""

from __future__ import annotations

import pytest

from workers.probes.topology import link_rank
from workers.protocol import v1
from workers.simulation.engine import EngineShape
from workers.simulation.hardware import (
    NONE_CUT,
    CutCards,
    make_accelerators,
    make_cut_cards,
    make_topology,
    read_cut_cards,
)
from workers.simulation.identity import NodeIdentity
from workers.simulation.node import NodeShape, SimulatedNode
from workers.simulation.weights import SimulatedStore, StoreShape


def test_simulated_links_rank_like_real_ones_and_fit_a_message() -> None:
    tiles = make_accelerators("n", 12, 1 << 36)
    topology = make_topology([tile.uuid for tile in tiles])
    assert topology is not None
    assert all(link.rank == link_rank(link.kind) for link in topology.links)
    assert {link.kind for link in topology.links} == {"NV4", "PIX", "NODE", "SYS"}
    ends = len(topology.endpoints)
    assert {(link.a, link.b) for link in topology.links} == {(a, b) for b in range(ends) for a in range(b)}
    hello = v1.Hello(
        node_id="n", boot_id="b", major=1, minor=3, agent_version="1", hostname="h", address="127.0.0.1",
        accelerators=tiles, topology=topology,
    )  # fmt: skip
    sealed = v1.encode_report(hello, node_id="n", node_key=b"k" * 32)
    assert len(sealed) < v1.MAX_MESSAGE_BYTES // 8


def hello_of(shape: NodeShape) -> v1.Hello:
    key = "00" * 32
    identity = NodeIdentity(
        name="n", node_id="id", node_key=key, rack="r", supernode="s", address="127.0.0.1"
    )
    node = SimulatedNode(identity, shape, SimulatedStore("n", StoreShape()), seed=1, run_id="run", now=0.0)
    first = node.reports(0.0, 0.0)[0]
    hello = v1.decode_report(v1.open_envelope(first), node_key=bytes.fromhex(key))
    assert isinstance(hello, v1.Hello)
    return hello


def test_cut_cards_are_told_as_slices_and_never_offered_themselves() -> None:
    cut = read_cut_cards("2:3g.40gb+2g.20gb+1g.10gb")
    hello = hello_of(NodeShape(slots=3, cut_cards=cut, engine=EngineShape()))
    assert [card.ordinal for card in hello.split_cards] == [3, 4]
    slices = [found for found in hello.accelerators if found.parent_uuid]
    assert len(hello.accelerators) - len(slices) == 3
    assert len(slices) == cut.slices == 6
    cards = {card.uuid for card in hello.split_cards}
    assert {part.parent_uuid for part in slices} == cards
    assert not cards & {found.uuid for found in hello.accelerators}
    assert [part.profile for part in slices[:3]] == ["3g.40gb", "2g.20gb", "1g.10gb"]
    assert len({found.uuid for found in hello.accelerators}) == 9
    assert all(len(found.uuid) <= 80 for found in hello.accelerators)
    for card in hello.split_cards:
        cut_from_it = [part for part in slices if part.parent_uuid == card.uuid]
        assert sum(part.memory_bytes for part in cut_from_it) <= card.memory_bytes
    assert hello.mps_ready


def test_fleet_without_cut_cards_is_as_before() -> None:
    hello = hello_of(NodeShape(slots=2))
    assert (hello.split_cards, hello.mps_ready, len(hello.accelerators)) == ((), False, 2)
    assert make_cut_cards("n", NONE_CUT, first_ordinal=2) == ((), ())


def test_layouts_are_read_as_a_card_can_be_cut() -> None:
    assert read_cut_cards("1") == CutCards(1)
    assert read_cut_cards("0:7g.80gb") == CutCards(0, ("7g.80gb",))


@pytest.mark.parametrize("text", ["", "x", "9", "1:", "1:3g", "1:4g.40gb+4g.40gb", "1:1g.90gb", "-1"])
def test_layouts_that_no_card_has_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_cut_cards(text)
