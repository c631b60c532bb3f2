"""CUDA_VISIBLE_DEVICES: what CUDA would see, and a refusal where CUDA would quietly see something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.probes.fake_tools import sample
from workers.probes.devices import Device
from workers.probes.nvidia import parse_list, parse_query
from workers.probes.selection import SelectionError, select_visible

T4, A100 = parse_query(sample("mixed.q.xml")).devices
H100 = parse_query(sample("h100x8.q.xml")).devices
CARD, *SLICES = parse_query(sample("mig.q.xml"), parse_list(sample("mig.L.txt"))).devices


def chosen(text: str | None, devices: tuple[Device, ...] = H100, order: str = "") -> list[str]:
    return [device.uuid for device in select_visible(text, devices, device_order=order)]


def test_unset_shows_all_and_empty_or_minus_one_none() -> None:
    assert len(chosen(None)) == 8
    assert chosen("") == chosen("-1") == chosen("NoDevFiles") == chosen("  ") == []


def test_indices_and_uuids_in_the_order_given() -> None:
    assert chosen("1,0") == [H100[1].uuid, H100[0].uuid]
    assert chosen(f"{H100[3].uuid}, 0") == [H100[3].uuid, H100[0].uuid]
    assert chosen("2,-1,0") == [H100[2].uuid]


def test_short_uuid_is_taken_where_it_is_unique() -> None:
    assert chosen("GPU-af7b61d8", (T4, A100)) == [T4.uuid]


def test_ambiguous_prefix_is_refused_with_all_it_could_mean() -> None:
    with pytest.raises(SelectionError, match="ambiguous") as refused:
        chosen("GPU-af7b6", (T4, A100))
    assert T4.uuid in str(refused.value)
    assert A100.uuid in str(refused.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [("GPU-0000dead", "names no accelerator"), ("8", "past the 8 cards"), ("0,zero", "neither an index"),
     ("0,0", "second time"), ("MIG-1", "names no accelerator"), ("all", "neither")],
)  # fmt: skip
def test_entry_that_names_nothing_is_refused(text: str, why: str) -> None:
    with pytest.raises(SelectionError, match=why):
        chosen(text)


def test_index_on_a_host_with_different_cards_needs_the_order_that_it_counts_by() -> None:
    with pytest.raises(SelectionError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        chosen("0", (T4, A100))
    assert chosen("0", (A100, T4), order="PCI_BUS_ID") == [T4.uuid]


def test_split_card_counts_by_its_slices_alone() -> None:
    devices = (CARD, *SLICES)
    assert chosen(None, devices) == [part.uuid for part in SLICES]
    assert chosen(SLICES[1].uuid, devices) == [SLICES[1].uuid]
    assert chosen("MIG-0000001a", devices) == [SLICES[2].uuid]
    for entry in ("0", CARD.uuid):
        with pytest.raises(SelectionError, match="name its slices"):
            chosen(entry, devices)


@given(st.text(max_size=30))
def test_any_text_selects_known_devices_or_is_refused(text: str) -> None:
    try:
        found = select_visible(text, H100)
    except SelectionError:
        return
    assert set(found) <= set(H100)
