"""A container's limits beat the machine's totals, and rates count hardware that is still there."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.probes.accelerators import cpu_accelerator
from workers.probes.host import DiskCounters, HostProbe
from workers.probes.limits import Limits, parse_cpu_max, read_limits, usable_cpu_count, usable_memory_bytes
from workers.probes.network import NicCounters, read_nic_counters

GIB = 1 << 30


def make_group(folder: Path, **values: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("_", ".")).write_text(value + "\n")


def test_tightest_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    make_group(root / "a", memory_max=str(4 * GIB), memory_current=str(3 * GIB), cpu_max="max 100000",
               memory_stat=f"anon 1\ninactive_file {GIB}")  # fmt: skip
    make_group(root / "a" / "b", memory_max=str(8 * GIB), memory_current="5", cpu_max="250000 100000")
    membership.write_text("1:name=systemd:/x\n0::/a/b\n")
    assert read_limits(root, membership) == Limits(4 * GIB, 2 * GIB, 2.5)


def test_group_of_a_container_is_the_root_itself(tmp_path: Path) -> None:
    make_group(tmp_path, memory_max=str(GIB), cpu_max="50000 100000")
    (tmp_path / "self").write_text("0::/../../elsewhere\n")
    assert read_limits(tmp_path, tmp_path / "self") == Limits(GIB, None, 0.5)


def test_no_limit_and_no_cgroup_are_no_limit(tmp_path: Path) -> None:
    make_group(tmp_path / "free", memory_max="max", cpu_max="max 100000")
    assert (
        read_limits(tmp_path / "free", tmp_path / "none")
        == read_limits(tmp_path / "gone", tmp_path)
        == Limits()
    )


@pytest.mark.parametrize("odd", ["", "max", "max 100000", "1", "x y", "0 100000", "100000 0", "1 2 3"])
def test_odd_cpu_limits_are_none(odd: str) -> None:
    assert parse_cpu_max(odd) is None


@given(st.text())
def test_no_text_makes_the_limit_reader_raise(text: str) -> None:
    assert parse_cpu_max(text) is None or len(text.split()) == 2


def test_usable_is_the_smaller_of_machine_and_limit() -> None:
    assert usable_cpu_count(Limits(cpus=0.5)) == 1
    assert usable_cpu_count(Limits(cpus=1e6)) == usable_cpu_count(Limits())
    assert usable_memory_bytes(Limits(memory_bytes=1 << 20)) == 1 << 20
    assert usable_memory_bytes(Limits(memory_bytes=1 << 60)) == psutil.virtual_memory().total
    assert cpu_accelerator("n1", 0, Limits(memory_bytes=1000)).memory_bytes == 800
    assert cpu_accelerator("n1", 0, Limits(cpus=1.0)).name == "CPU, 1 threads"


def test_telemetry_shows_what_is_left_before_the_nearer_wall(tmp_path: Path) -> None:
    seen = HostProbe(tmp_path, limits=lambda: Limits(64 << 20, 16 << 20, None)).read()
    assert (seen.memory_total_bytes, seen.memory_used_bytes) == (64 << 20, 16 << 20)
    free = HostProbe(tmp_path, limits=Limits).read()
    assert free.memory_total_bytes == psutil.virtual_memory().total


def test_interface_that_was_reset_or_came_anew_spoils_no_rate(tmp_path: Path) -> None:
    readings = iter([
        {"eth0": NicCounters(1000, 100), "eth1": NicCounters(900, 900)},
        {"eth0": NicCounters(3000, 500), "eth1": NicCounters(5, 5), "eth2": NicCounters(10**9, 10**9)},
        {"eth9": NicCounters(1, 1)},
    ])  # fmt: skip
    times = iter([1.0, 3.0, 4.0])
    probe = HostProbe(tmp_path, clock=lambda: next(times), read_nics=lambda: next(readings))
    seen = [probe.read(), probe.read(), probe.read()]
    rates = [(one.network_receive_bytes_per_second, one.network_send_bytes_per_second) for one in seen]
    assert rates == [(None, None), (1000.0, 200.0), (None, None)]
    assert [list(one.interfaces) for one in seen] == [[], ["eth0"], []]


def test_of_hundreds_of_interfaces_the_busiest_are_told_and_all_are_counted(tmp_path: Path) -> None:
    readings = iter([
        {f"vf{n}": NicCounters(0, 0) for n in range(300)},
        {f"vf{n}": NicCounters(n, 0) for n in range(300)},
    ])  # fmt: skip
    times = iter([1.0, 2.0])
    probe = HostProbe(tmp_path, clock=lambda: next(times), read_nics=lambda: next(readings))
    probe.read()
    seen = probe.read()
    assert list(seen.interfaces)[:2] == ["vf299", "vf298"]
    assert len(seen.interfaces) == 16
    assert seen.network_receive_bytes_per_second == sum(range(300))


def test_disks_have_rates_between_two_readings_and_none_where_they_are_not_told(tmp_path: Path) -> None:
    counters = iter([DiskCounters(100, 50), DiskCounters(2100, 1050), DiskCounters(5, 5), None])
    times = iter([1.0, 3.0, 4.0, 5.0])
    probe = HostProbe(tmp_path, clock=lambda: next(times), read_disks=lambda: next(counters))
    seen = [probe.read() for _ in range(4)]
    rates = [(one.disk_read_bytes_per_second, one.disk_write_bytes_per_second) for one in seen]
    assert rates == [(None, None), (1000.0, 500.0), (None, None), (None, None)]


def test_pressure_is_the_kernels_figure_or_unknown(tmp_path: Path) -> None:
    (tmp_path / "cpu").write_text("some avg10=12.50 avg60=1.00 avg300=0.10 total=5\nfull avg10=0.00 x\n")
    (tmp_path / "io").write_text("some avg10=0.00 avg60=1.00 avg300=0.10 total=5\n")
    seen = HostProbe(tmp_path, pressure=tmp_path).read()
    assert (seen.cpu_stalled_ratio, seen.io_stalled_ratio) == (0.125, 0.0)
    assert seen.memory_stalled_ratio is None
    (tmp_path / "cpu").write_bytes(b"\xff\xfe")
    assert HostProbe(tmp_path, pressure=tmp_path).read().cpu_stalled_ratio is None


def test_loopback_is_no_network() -> None:
    assert "lo" not in read_nic_counters()
