"""A simulated node's links are ranked as the probe ranks real ones."""

from __future__ import annotations

from workers.probes.topology import link_rank
from workers.protocol import v1
from workers.simulation.hardware import make_accelerators, make_topology


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
