"""Ranks of several nodes talk by the interface that their node is known by."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.probes.interfaces import find_interface, rdma_adapters


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "localhost"])
def test_interface_is_found_by_the_nodes_address(address: str) -> None:
    assert find_interface(address) == "lo"


def test_interface_that_leads_to_the_other_node_stands_in_for_an_unknown_address() -> None:
    assert find_interface("192.0.2.77", peer="127.0.0.1") == "lo"


def test_nothing_is_said_where_nothing_is_found() -> None:
    assert find_interface("192.0.2.77") == ""


def test_only_adapters_that_rdma_goes_by_are_named_each_once(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    (tmp_path / "mlx5_1").mkdir()
    assert rdma_adapters(("mlx5_1", "", "eth0", "mlx5_0", "mlx5_1"), tmp_path) == ("mlx5_1", "mlx5_0")
