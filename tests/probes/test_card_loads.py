"""Loads of cards: rates of counters that reset, drivers of any age, lost cards, and who is believed first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.nvml_library import FakeCard, FakeNvmlLibrary
from tests.probes.fake_tools import sample
from workers.probes import nvidia, nvml
from workers.probes.card_loads import MOST_CARDS, aged, loads_of_survey, merge_loads, pcie_link
from workers.probes.nvml import NvmlReader, main
from workers.protocol.machine import AcceleratorLoad

PCIE_TX, PCIE_RX, LINK_TX, LINK_RX = 197, 198, 138, 139
LINK_COUNT, LINK_SPEED, CRC, REPLAY, RECOVERY = 91, 90, 38, 52, 59


class Seconds:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def linked_card(uuid: str = "GPU-a") -> FakeCard:
    card = FakeCard(uuid)
    for name, value in ((PCIE_TX, 10_000), (PCIE_RX, 50_000), (LINK_COUNT, 18), (LINK_SPEED, 26_562)):
        card.count(name, value)
    for name in (LINK_TX, LINK_RX):
        card.count(name, 1_000, over_links=True)
    for name, value in ((CRC, 1), (REPLAY, 2), (RECOVERY, 0)):
        card.count(name, value)
    return card


def reader_of(*cards: FakeCard, lacks: tuple[str, ...] = ()) -> tuple[NvmlReader, FakeNvmlLibrary, Seconds]:
    clock, library = Seconds(), FakeNvmlLibrary(list(cards), lacks=lacks)
    library.install()
    return NvmlReader(clock), library, clock


def test_library_tells_everything_in_our_units() -> None:
    card = linked_card()
    reader, library, clock = reader_of(card)
    first = reader.read()[0]
    assert (first.pcie_send_bytes_per_second, first.nvlink_send_bytes_per_second) == (None, None)
    card.count(PCIE_TX, 10_000 + 5_000_000)
    card.count(PCIE_RX, 50_000)
    card.count(LINK_TX, 1_000 + 2_000, over_links=True)
    card.links_down = {3}
    card.clocks_mask = 0x4 | 0x40 | 0x1
    library.xids.extend([(0, 31), (0, 94)])
    clock.now += 5.0
    assert reader.read()[0] == AcceleratorLoad(
        uuid="GPU-a",
        sources=("nvml",),
        used_ratio=0.4,
        memory_used_bytes=30 << 30,
        memory_total_bytes=80 << 30,
        pcie_receive_bytes_per_second=0.0,
        pcie_send_bytes_per_second=1_000_000.0,
        pcie_link_bytes_per_second=16 * 3938.5e6,
        pcie_replays=0,
        nvlinks=18,
        nvlinks_up=17,
        nvlink_receive_bytes_per_second=0.0,
        nvlink_send_bytes_per_second=2_000 * 1024 / 5,
        nvlink_link_bytes_per_second=17 * 26_562e6,
        nvlink_errors=3,
        power_watts=310.5,
        power_limit_watts=700.0,
        temperature_celsius=55,
        held_back_by=("power cap", "heat"),
        ecc_uncorrected=0,
        last_xid=94,
    )


def test_counter_that_fell_makes_a_gap_and_no_rate_that_is_not() -> None:
    card = linked_card()
    reader, _, clock = reader_of(card)
    reader.read()
    card.count(PCIE_TX, 5)
    clock.now += 5.0
    assert reader.read()[0].pcie_send_bytes_per_second is None
    card.count(PCIE_TX, 1005)
    clock.now += 5.0
    assert reader.read()[0].pcie_send_bytes_per_second == 200.0


def test_driver_without_newer_functions_is_asked_the_older_way() -> None:
    card = FakeCard("GPU-a", clocks_mask=0x20, pcie_kilobytes={0: 2_000, 1: 3_000})
    lacks = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperatureV")
    seen = reader_of(card, lacks=lacks)[0].read()[0]
    assert (seen.held_back_by, seen.temperature_celsius) == (("heat",), 55)
    assert (seen.pcie_send_bytes_per_second, seen.pcie_receive_bytes_per_second) == (2e6, 3e6)
    assert seen.nvlinks is None, "a card whose driver does not count links may have some"


def test_what_a_card_lacks_is_unknown_without_a_word_and_what_fails_is_said_once() -> None:
    plain = FakeCard("GPU-plain", used_percent=None, ecc_uncorrected=None, power_milliwatts=None)
    plain.tells_errors = False
    plain.count(LINK_COUNT, 0)
    lost = linked_card("GPU-lost")
    reader, *_ = reader_of(plain, lost)
    lost.lost = True
    seen, gone = reader.read()
    assert (seen.used_ratio, seen.ecc_uncorrected, seen.power_watts, seen.last_xid, seen.notes) == (
        *[None] * 4,
        (),
    )
    assert (seen.nvlinks, seen.nvlinks_up, seen.nvlink_errors) == (0, 0, None)
    assert gone.notes == ("counters: GPU is lost",)
    assert (gone.used_ratio, gone.pcie_link_bytes_per_second, gone.held_back_by) == (None, None, None)


def test_process_whose_cards_are_all_gone_ends_so_that_another_opens_the_library_anew(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    FakeNvmlLibrary([FakeCard("GPU-a", lost=True)]).install()
    assert main(["5"]) == 1
    assert capfdbinary.readouterr().out == b"[]\n"


@pytest.mark.parametrize("memory", [None, 80 << 30])
def test_process_goes_on_while_a_card_tells_anything_and_ends_when_none_does(
    memory: int | None, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cards that share the host's memory have none of their own to tell."""
    card = FakeCard("GPU-a", memory_total_bytes=memory)
    card.tells_errors = True
    FakeNvmlLibrary([card]).install()
    pauses = 0

    def pause(*_: object) -> tuple[list[object], ...]:
        nonlocal pauses
        pauses += 1
        card.lost = pauses == 2
        return ([], [], [])

    monkeypatch.setattr(nvml.select, "select", pause)
    assert main(["5"]) == 1
    assert (pauses, capfdbinary.readouterr().out.count(b"\n")) == (2, 3)


def load(uuid: str = "GPU-a", **values: object) -> AcceleratorLoad:
    return AcceleratorLoad(uuid=uuid, **values)  # type: ignore[arg-type]  # any field


def test_first_source_wins_field_by_field_and_pairs_stay_together() -> None:
    page = load(sources=("dcgm",), age_seconds=9.0, used_ratio=0.0, pcie_send_bytes_per_second=5.0)
    library = load(
        sources=("nvml",), ordinal=3, age_seconds=1.0, used_ratio=0.9, power_watts=300.0,
        pcie_send_bytes_per_second=7.0, pcie_receive_bytes_per_second=8.0,
    )  # fmt: skip
    survey = load(sources=("nvidia-smi",), ordinal=3, age_seconds=50.0, power_watts=200.0)
    (merged,) = merge_loads([[page], [library], [survey]])
    assert merged == load(
        ordinal=3, sources=("dcgm", "nvml"), age_seconds=9.0, used_ratio=0.0, power_watts=300.0,
        pcie_send_bytes_per_second=5.0,
    )  # fmt: skip


def test_cards_stand_in_their_order_and_no_more_than_a_heartbeat_holds() -> None:
    many = [load(f"GPU-{place}", ordinal=place) for place in range(MOST_CARDS + 8)]
    merged = merge_loads([reversed(many)])
    assert [card.ordinal for card in merged] == list(range(MOST_CARDS))


def test_survey_is_the_last_resort_and_says_its_tool_and_age() -> None:
    devices = nvidia.parse_query(sample("h100x8.q.xml")).devices
    slice_of_first = replace(devices[0], parent_uuid=devices[0].uuid, uuid="MIG-1")
    found = loads_of_survey((*devices, slice_of_first), 42.0)
    assert len(found) == len(devices)
    assert (found[0].sources, found[0].age_seconds) == (("nvidia-smi",), 42.0)
    assert found[0].temperature_celsius == devices[0].temperature_celsius
    assert found[0].pcie_send_bytes_per_second is None
    assert [later.age_seconds for later in aged(found, 1.5)] == [43.5] * len(devices)


@pytest.mark.parametrize(("generation", "lanes"), [(None, 16), (5, None), (9, 16), (5, 0)])
def test_link_of_unknown_generation_or_lanes_has_no_speed(generation: int | None, lanes: int | None) -> None:
    assert pcie_link(generation, lanes) is None
