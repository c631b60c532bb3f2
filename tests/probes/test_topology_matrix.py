"""`nvidia-smi topo -m`: links by UUID and adapter name, ordered, and never a wrong one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.probes.fake_tools import sample
from workers.probes.nvidia import parse_list
from workers.probes.topology import Topology, link_rank, parse_topology


def read(kind: str) -> Topology:
    cards = parse_list(sample(f"{kind}.L.txt"))
    return parse_topology(sample(f"{kind}.topo.txt"), {card.ordinal: card.uuid for card in cards})


def kinds(topology: Topology) -> dict[frozenset[str], str]:
    names = [end.name for end in topology.endpoints]
    return {frozenset((names[link.a], names[link.b])): link.kind for link in topology.links}


def test_eight_cards_and_eight_adapters_with_ansi_header() -> None:
    found = read("h100x8")
    uuids = [card.uuid for card in parse_list(sample("h100x8.L.txt"))]
    assert [end.name for end in found.endpoints] == [*uuids, *(f"mlx5_{i}" for i in range(7)), "mlx5_bond_0"]
    assert [end.numa_node for end in found.endpoints[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.endpoints[4].cpus == "52-103,156-207"
    assert found.endpoints[8].numa_node is None
    links = kinds(found)
    assert len(links) == 16 * 15 // 2
    assert links[frozenset((uuids[0], uuids[7]))] == "NV18"
    assert links[frozenset((uuids[3], "mlx5_3"))] == "PIX"
    assert links[frozenset((uuids[0], "mlx5_5"))] == "SYS"
    assert found.notes == ()


def test_nearest_adapter_of_each_card_has_the_smallest_rank() -> None:
    found = read("h100x8")
    for card in range(8):
        ways = [link for link in found.links if link.a == card and link.b >= 8]
        assert min(ways, key=lambda link: link.rank).b == card + 8


def test_text_with_blanks_and_adapters_named_in_the_header() -> None:
    found = read("mixed")
    t4, a100 = (card.uuid for card in parse_list(sample("mixed.L.txt")))
    assert kinds(found) == {
        frozenset((t4, a100)): "SYS", frozenset((t4, "mlx5_0")): "PHB", frozenset((a100, "mlx5_0")): "SYS",
    }  # fmt: skip
    assert [(end.numa_node, end.cpus) for end in found.endpoints] == [(0, "0-15"), (1, "16-31"), (None, "")]


def test_single_card_has_no_link_but_its_numa_node() -> None:
    assert (read("consumer").links, read("consumer").endpoints[0].numa_node) == ((), 0)
    assert read("mig").endpoints[0].numa_node == 3


def test_unreadable_cell_is_left_out_and_noted() -> None:
    found = read("fallen")
    assert (found.links, found.notes) == ((), ("link GPU0-GPU1: ERR!",))
    assert (found.endpoints[1].numa_node, found.endpoints[1].cpus) == (None, "")


def test_row_that_was_cut_off_is_read_from_the_other_direction() -> None:
    page = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \nGPU1\tNV4\t X \tPIX\nNIC0\tSYS\tPIX\t X \n"
    found = parse_topology(page, {0: "a", 1: "b"})
    assert kinds(found) == {
        frozenset("ab"): "NV4",
        frozenset(("a", "NIC0")): "SYS",
        frozenset(("b", "NIC0")): "PIX",
    }


def test_ranks_order_links_from_the_best_to_the_worst() -> None:
    order = ["NV18", "NV12", "NV4", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS", "what?"]
    assert all(link_rank(better) < link_rank(worse) for better, worse in pairwise(order))


@given(
    st.text()
    | st.lists(st.sampled_from(["\tGPU0\tGPU1\n", "GPU0", "\t", " X ", "NV9", "\n", "NIC0", "\x1b[4m"])).map(
        "".join
    )
)
def test_no_text_makes_it_raise_and_links_are_always_real(page: str) -> None:
    found = parse_topology(page, {0: "a"})
    assert found.endpoints or found.notes
    assert all(0 <= link.a < link.b < len(found.endpoints) for link in found.links)
