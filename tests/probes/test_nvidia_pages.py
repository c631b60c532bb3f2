"""nvidia-smi as it really prints: every release's layout is read, and no bad value spoils a good one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.probes.fake_tools import sample
from workers.probes.devices import Device, Inventory
from workers.probes.markup import read_markup
from workers.probes.nvidia import (
    normal_bus_id,
    parse_complaints,
    parse_gpu_csv,
    parse_list,
    parse_process_csv,
    parse_query,
)

MIB = 1 << 20
ODD = [
    "[N/A]",
    "N/A",
    "[Not Supported]",
    "ERR!",
    "[Unknown Error]",
    "Requested functionality has been deprecated",
]


def read(kind: str) -> Inventory:
    return parse_query(sample(f"{kind}.q.xml"), parse_list(sample(f"{kind}.L.txt")))


def test_consumer_card_is_read_through_broken_markup_and_deprecated_fields() -> None:
    found = read("consumer")
    (card,) = found.devices
    assert (card.name, card.memory_bytes, card.memory_used_bytes) == (
        "NVIDIA GeForce RTX 4090", 24564 * MIB, 1187 * MIB,
    )  # fmt: skip
    assert (card.power_watts, card.power_limit_watts, card.temperature_celsius) == (21.54, 450.0, 38.0)
    assert (card.pcie_generation, card.pcie_generation_max, card.pcie_width) == (1, 4, 16)
    assert (card.ecc_enabled, card.ecc_uncorrected_count, card.split) == (None, None, False)
    assert card.pci_bus_id == "0000:01:00.0"
    assert card.notes == ()  # a consumer card without ECC is no fault
    assert [(p.pid, p.memory_bytes) for p in found.processes] == [(4242, None), (5151, 1024 * MIB)]


def test_eight_cards_are_read_in_order_with_who_uses_them() -> None:
    found = read("h100x8")
    assert [card.ordinal for card in found.devices] == list(range(8))
    assert {card.memory_bytes for card in found.devices} == {81559 * MIB}
    assert {card.ecc_uncorrected_count for card in found.devices} == {3}
    assert {card.power_watts for card in found.devices} == {68.21}
    (process,) = found.processes
    assert (process.accelerator_uuid, process.pid) == (found.devices[0].uuid, 9000)


def test_old_layout_is_read_like_the_new() -> None:
    t4, a100 = read("mixed").devices
    assert (t4.name, t4.power_watts, t4.power_limit_watts) == ("Tesla T4", 9.93, 70.0)
    assert (t4.ecc_uncorrected_count, t4.pcie_width, t4.pcie_width_max) == (0, 8, 16)
    assert (a100.power_watts, a100.power_limit_watts) == (None, 250.0)


def test_mig_slices_take_uuid_and_profile_from_the_listing() -> None:
    card, *slices = read("mig").devices
    assert card.split
    assert [(s.profile, s.memory_bytes) for s in slices] == [
        ("3g.20gb", 19968 * MIB), ("2g.10gb", 9856 * MIB), ("1g.5gb", 4864 * MIB),
    ]  # fmt: skip
    assert all(s.uuid.startswith("MIG-") and s.parent_uuid == card.uuid for s in slices)
    assert slices[0].name == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"


def test_process_in_a_slice_is_seen_there_and_not_on_the_card() -> None:
    found = read("mig")
    (process,) = found.processes
    assert process.accelerator_uuid == next(d.uuid for d in found.devices if d.profile == "2g.10gb")


def test_slices_that_nothing_names_are_left_out_and_noted() -> None:
    found = parse_query(sample("mig.q.xml"))
    assert [device.parent_uuid for device in found.devices] == [""]
    assert len([note for note in found.notes if "MIG device" in note]) == 3


def test_fallen_card_has_nulls_and_notes_and_its_neighbour_everything() -> None:
    found = read("fallen")
    healthy, ill = found.devices
    assert (healthy.memory_bytes, healthy.notes) == (46068 * MIB, ())
    assert (ill.memory_bytes, ill.temperature_celsius, ill.utilization_ratio) == (None, None, None)
    assert ill.name == "NVIDIA L40S"  # -L still knew it
    assert "memory: [Unknown Error]" in ill.notes
    assert "temperature: ERR!" in ill.notes
    assert found.notes == ("GPU 0000:DB:00.0: GPU is lost",)


def test_missing_driver_is_said_and_gives_nothing() -> None:
    page = sample("driver_missing.txt")
    assert parse_query(page).devices == parse_gpu_csv(page).devices == ()
    assert parse_list(page) == ()
    (complaint,) = parse_complaints(page)
    assert complaint.startswith("NVIDIA-SMI has failed")
    assert parse_query(page).notes == (complaint,)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    ("path", "attribute"),
    [("product_name", "name"), ("total", "memory_bytes"), ("used", "memory_used_bytes"),
     ("gpu_temp", "temperature_celsius"), ("gpu_util", "utilization_ratio"), ("current_ecc", "ecc_enabled"),
     ("current_link_gen", "pcie_generation")],
)  # fmt: skip
def test_one_unreadable_field_is_null_alone(odd: str, path: str, attribute: str) -> None:
    page = re.sub(rf"(<{path}>)[^<]*", rf"\g<1>{odd}", sample("h100x8.q.xml"), count=1)
    first, *others = parse_query(page).devices
    whole, *rest = parse_query(sample("h100x8.q.xml")).devices
    assert getattr(first, attribute) is None
    assert others == rest
    kept = {name: getattr(first, name) for name in Device.__slots__ if name not in (attribute, "notes")}
    assert kept == {name: getattr(whole, name) for name in kept}
    if attribute in ("name", "memory_bytes") or odd in ("ERR!", "[Unknown Error]"):
        assert len(first.notes) == 1


@pytest.mark.parametrize(
    "missing", ["uuid", "fb_memory_usage", "temperature", "processes", "pci", "mig_mode"]
)
def test_missing_section_of_one_card_leaves_the_other_cards(missing: str) -> None:
    page = re.sub(rf"<{missing}>.*?</{missing}>", "", sample("h100x8.q.xml"), count=1, flags=re.DOTALL)
    found = parse_query(page)
    assert len(found.devices) == (7 if missing == "uuid" else 8)
    assert found.devices[-7:] == read("h100x8").devices[1:]


def test_page_that_was_cut_off_gives_the_cards_before_the_cut() -> None:
    page = sample("h100x8.q.xml")
    half = page[: page.index("</gpu>", len(page) // 2)]
    assert 3 <= len(parse_query(half).devices) <= 6


def test_columns_are_read_with_units_and_in_any_order() -> None:
    t4, a100 = parse_gpu_csv(sample("mixed.query.csv")).devices
    assert (t4.ordinal, t4.memory_bytes, t4.power_watts, t4.utilization_ratio) == (0, 15109 * MIB, 9.93, 0.0)
    assert (a100.power_watts, a100.utilization_ratio, a100.pci_bus_id) == (None, 0.12, "0000:af:00.0")
    bare = parse_gpu_csv("GPU-a, 143771, H200\n", ("uuid", "memory.total", "name"))
    assert bare.devices[0].memory_bytes == 143_771 * MIB


@pytest.mark.parametrize("odd", ODD[:5])
def test_odd_column_is_null_with_a_note_and_rows_beside_it_are_kept(odd: str) -> None:
    page = f"uuid, name, memory.total [MiB]\nGPU-a, H200, {odd}\nnonsense\nGPU-b, H200, 143771 MiB\n"
    found = parse_gpu_csv(page)
    assert [(d.uuid, d.memory_bytes) for d in found.devices] == [("GPU-a", None), ("GPU-b", 143_771 * MIB)]
    assert found.devices[0].notes == (f"memory: {odd}",)
    assert found.notes == ("left out a line: nonsense",)


def test_processes_on_accelerators_are_read_tolerantly() -> None:
    page = "GPU-a, 4711, [N/A]\nGPU-a, [N/A], 10\nGPU-b, 4712, 2048\nGPU-b, 99999999999, 1\n"
    assert [(p.pid, p.memory_bytes) for p in parse_process_csv(page)] == [(4711, None), (4712, 2048 * MIB)]


def test_bus_addresses_are_written_as_linux_does() -> None:
    assert normal_bus_id("00000000:3B:00.0") == normal_bus_id("0000:3b:00.0") == normal_bus_id("3B:00.0")
    assert normal_bus_id("00000000:3B:00.0") == "0000:3b:00.0"
    assert normal_bus_id("N/A") == ""


@given(st.text())
def test_no_text_makes_a_parser_raise(page: str) -> None:
    assert parse_query(page).devices == ()
    assert parse_query(page).notes
    parse_gpu_csv(page)
    parse_list(page)
    parse_process_csv(page)
    read_markup(page)


PIECES = ["<gpu>", "</gpu>", "<uuid>GPU-a</uuid>", "<fb_memory_usage>", "<total>", "9" * 40, "MiB", "ERR!",
          "<processes/>", "<", "&", "]]>", "<mig_devices>", "<mig_device>", "</x>", "\x00",
          "GPU-b, 1, 2\n"]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5)))
def test_no_shuffled_page_makes_a_parser_raise(pieces: list[str]) -> None:
    for device in parse_query("".join(pieces)).devices:
        assert device.memory_bytes is None or device.memory_bytes <= 1 << 53
    parse_gpu_csv("".join(pieces))


@given(st.integers(0, 13_000), st.text(max_size=3))
def test_damage_in_one_place_costs_at_most_two_cards(place: int, damage: str) -> None:
    page, listed = sample("h100x8.q.xml"), parse_list(sample("h100x8.L.txt"))
    damaged = page[:place] + damage + page[place + 3 :]
    whole = {device.uuid: device for device in parse_query(page, listed).devices}
    found = {device.uuid: device for device in parse_query(damaged, listed).devices}
    assert len([uuid for uuid, device in found.items() if whole.get(uuid) == device]) >= 6


@pytest.mark.parametrize(
    "page",
    ["<a>" * 100_000, "<a>" * 30_000 + "</b>" * 30_000, "<a/>x" * 100_000, "<a" * 200_000, "<gpu>" * 3000],
)
@pytest.mark.timeout(20)
def test_work_stays_in_proportion_to_the_page(page: str) -> None:
    # Without the bound on nesting the second of these takes minutes, not milliseconds.
    assert parse_query(page).devices == ()
