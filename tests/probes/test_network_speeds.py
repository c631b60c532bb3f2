"""How fast links are, and that RDMA counters count words and not bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.probes.host import HostProbe
from workers.probes.network import (
    MOST_PORTS,
    NicCounters,
    parse_port_rate,
    rdma_rates,
    read_link_speed,
    read_rdma_counters,
)


def make_port(adapters: Path, name: str, *, state: str = "4: ACTIVE", **files: str) -> None:
    port = adapters / name.partition("/")[0] / "ports" / name.partition("/")[2]
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "rate").write_text(files.pop("rate", "400 Gb/sec (4X NDR)") + "\n")
    for counter, text in files.items():
        (port / "counters" / counter).write_text(text + "\n")


def test_data_counters_of_a_port_are_words_of_four_bytes(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0/1", port_rcv_data="250", port_xmit_data="1000")
    make_port(tmp_path, "mlx5_1/1", state="1: DOWN", port_rcv_data="7", port_xmit_data="7")
    make_port(tmp_path, "mlx5_2/1", port_rcv_data="7")
    make_port(tmp_path, "mlx5_3/1", port_rcv_data="none", port_xmit_data="7")
    assert read_rdma_counters(tmp_path) == {"mlx5_0/1": NicCounters(1000, 4000, 50e9)}
    assert read_rdma_counters(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("400 Gb/sec (4X NDR)", 50e9), ("2.5 Gb/sec (1X SDR)", 312.5e6), ("0 Gb/sec", None), ("", None),
     ("x", None)],
)  # fmt: skip
def test_rate_of_a_port_is_bytes(text: str, expected: float | None) -> None:
    assert parse_port_rate(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("100000", 12.5e9), ("-1", None), ("0", None), ("", None), ("4294967295x", None)]
)
def test_interface_that_is_down_has_no_speed(tmp_path: Path, text: str, expected: float | None) -> None:
    (tmp_path / "speed").write_text(text + "\n")
    assert read_link_speed(tmp_path) == expected
    assert read_link_speed(tmp_path / "gone") is None


def test_port_that_was_reset_spoils_no_rate_and_the_busiest_are_told() -> None:
    before = {f"mlx5_{n}/1": NicCounters(100, 0) for n in range(MOST_PORTS + 4)}
    after = {f"mlx5_{n}/1": NicCounters(100 + n, 0) for n in range(MOST_PORTS + 4)} | {
        "mlx5_19/1": NicCounters(3, 0)
    }
    rates = rdma_rates(before, after, 2.0)
    assert next(iter(rates)) == "mlx5_18/1"
    assert rates["mlx5_18/1"].receive_bytes_per_second == 9.0
    assert len(rates) == MOST_PORTS


def test_host_tells_its_ports_and_its_busiest_core(tmp_path: Path) -> None:
    readings = iter([{"mlx5_0/1": NicCounters(0, 0, 50e9)}, {"mlx5_0/1": NicCounters(4000, 0, 50e9)}])
    times = iter([10.0, 12.0])
    probe = HostProbe(tmp_path, lambda: next(times), read_rdma=lambda: next(readings))
    assert probe.read().rdma == {}
    seen = probe.read()
    assert (seen.rdma["mlx5_0/1"].receive_bytes_per_second, seen.rdma["mlx5_0/1"].link_bytes_per_second) == (
        2000.0,
        50e9,
    )
    assert seen.cpu_busiest_ratio is not None
    assert seen.cpu_used_ratio is not None
    assert 0 <= seen.cpu_used_ratio <= seen.cpu_busiest_ratio <= 1
