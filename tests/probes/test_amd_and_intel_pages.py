"""rocm-smi, amd-smi and xpu-smi: keys differ by release, values are read or null."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.probes.fake_tools import sample
from workers.probes.amd import parse_amd_smi, parse_rocm_smi, unique_uuid
from workers.probes.intel import device_ids, parse_xpu_smi
from workers.probes.trees import load

MIB = 1 << 20


def test_rocm_smi_behind_a_warning_with_one_bad_size() -> None:
    first, second = parse_rocm_smi(sample("mi300x.rocm.json")).devices
    assert (first.uuid, first.name) == ("GPU-5a11c0de00000001", "AMD Instinct MI300X OAM")
    assert (first.memory_bytes, first.memory_used_bytes) == (206_141_652_992, 297_144_320)
    assert (first.power_watts, first.temperature_celsius, first.utilization_ratio) == (134.0, 41.0, 0.03)
    assert first.pci_bus_id == "0000:0c:00.0"
    assert (second.memory_bytes, second.memory_used_bytes) == (None, 297_144_320)
    assert second.notes == ("memory: ERR!",)


def test_rocm_smi_of_another_release_and_a_card_without_unique_id() -> None:
    (card,) = parse_rocm_smi(sample("radeon.rocm.json")).devices
    assert (card.uuid, card.pci_bus_id) == ("", "0000:03:00.0")
    assert (card.name, card.power_watts, card.temperature_celsius) == ("Radeon RX 7900 XTX", 21.0, 45.0)


def test_amd_smi_names_a_card_as_rocm_smi_does() -> None:
    found = parse_amd_smi(
        sample("mi300x.amd-static.json"),
        sample("mi300x.amd-process.json"),
        sample("mi300x.amd-metric.json"),
    )
    first, second = found.devices
    assert first.uuid == parse_rocm_smi(sample("mi300x.rocm.json")).devices[0].uuid
    assert (first.memory_bytes, first.memory_used_bytes) == (196_592 * MIB, 283 * MIB)
    assert (first.power_watts, first.temperature_celsius, first.numa_node) == (134.0, 41.0, 1)
    assert (second.uuid, second.name, second.memory_bytes) == ("", None, 196_592 * MIB)
    (process,) = found.processes
    assert (process.accelerator_uuid, process.pid, process.memory_bytes) == (first.uuid, 31337, 1 << 30)


def test_unique_id_of_zeros_names_nothing() -> None:
    assert unique_uuid("0x0") == unique_uuid("N/A") == unique_uuid(None) == ""


def test_xpu_smi_joins_list_details_and_stats() -> None:
    listing = sample("max1550.list.json")
    assert device_ids(listing) == (0, 1)
    found = parse_xpu_smi(
        listing,
        [sample("max1550.detail0.json"), '{"error": "device not found"}'],
        [sample("max1550.stats0.json")],
        sample("max1550.ps.json"),
    )
    first, second = found.devices
    assert (first.memory_bytes, first.memory_used_bytes) == (128 << 30, 512 * MIB)
    assert (first.power_watts, first.utilization_ratio, first.temperature_celsius) == (310.2, 0.125, None)
    assert (first.pcie_generation_max, first.pcie_width_max) == (5, 16)
    assert (second.ordinal, second.memory_bytes, second.notes) == (1, None, ("memory: missing",))
    (process,) = found.processes
    assert (process.accelerator_uuid, process.pid, process.memory_bytes) == (first.uuid, 606, 2 * MIB)


def test_what_xpu_smi_complains_of_is_said() -> None:
    assert parse_xpu_smi('{"error": "XPUM failed to initialize", "errno": 2}').notes == (
        "xpu-smi: XPUM failed to initialize",
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["card0", "gpu", "gpu_data", "asic", "vram", "size", "value", "unit", "process_list", "pid",
             "device_list", "device_id", "device_level", "metrics_type", "Unique ID", "VRAM Total Memory (B)"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@given(JSON.map(json.dumps) | st.text())
def test_no_text_makes_a_parser_raise(page: str) -> None:
    for found in (
        parse_rocm_smi(page),
        parse_amd_smi(page, page, page),
        parse_xpu_smi(page, [page], [page], page),
    ):
        assert found.devices or found.notes
    device_ids(page)


def test_pages_that_break_json_readers_are_no_pages() -> None:
    assert load("[" * 100_000) is None
    assert load("no json") is None
    assert parse_rocm_smi('{"card0": {"VRAM Total Memory (B)": 1' + "0" * 5000 + "}}").devices[0:1] in (
        (),
        (),
    )
