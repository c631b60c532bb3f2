"""Pages of dcgm-exporters of several releases: units, blanks, slices, and what is no figure at all."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.probes.dcgm import DcgmReader
from workers.protocol.machine import AcceleratorLoad

A, B = "GPU-aaaaaaaa-0000-1111-2222-333333333333", "GPU-bbbbbbbb-0000-1111-2222-333333333333"


def page(*rows: tuple[str, object], uuid: str = A, gpu: int = 0, more: str = "") -> str:
    labels = f'gpu="{gpu}",UUID="{uuid}",device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3"{more}'
    return "".join(f"{name}{{{labels}}} {value}\n" for name, value in rows)


CURRENT = (
    "# HELP DCGM_FI_PROF_PCIE_TX_BYTES What the card sends.\n"
    "# TYPE DCGM_FI_PROF_PCIE_TX_BYTES gauge\n"
    + page(
        ("DCGM_FI_DEV_GPU_UTIL", 87),
        ("DCGM_FI_DEV_FB_FREE", 10240),
        ("DCGM_FI_DEV_FB_USED", 71000),
        ("DCGM_FI_DEV_FB_RESERVED", 560),
        ("DCGM_FI_PROF_PCIE_TX_BYTES", 1250000000),
        ("DCGM_FI_PROF_PCIE_RX_BYTES", 0),
        ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", 4),
        ("DCGM_FI_PROF_NVLINK_TX_BYTES", 2.5e9),
        ("DCGM_FI_PROF_NVLINK_RX_BYTES", 2.25e9),
        ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", 4800),
        ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 1),
        ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", 2),
        ("DCGM_FI_DEV_POWER_USAGE", 512.25),
        ("DCGM_FI_DEV_GPU_TEMP", 64),
        ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", 4),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 0),
        ("DCGM_FI_DEV_XID_ERRORS", 0),
        ("DCGM_FI_DEV_SM_CLOCK", 1980),
    )
)


def read(text: str) -> AcceleratorLoad:
    (found,) = DcgmReader().read(text)
    return found


def test_current_page_is_read_in_our_units() -> None:
    assert read(CURRENT) == AcceleratorLoad(
        uuid=A,
        sources=("dcgm",),
        used_ratio=0.87,
        memory_used_bytes=71000 << 20,
        memory_total_bytes=(71000 + 10240 + 560) << 20,
        pcie_receive_bytes_per_second=0.0,
        pcie_send_bytes_per_second=1.25e9,
        pcie_replays=4,
        nvlink_receive_bytes_per_second=2.25e9,
        nvlink_send_bytes_per_second=2.5e9,
        nvlink_errors=3,
        power_watts=512.25,
        temperature_celsius=64.0,
        held_back_by=("power cap",),
        ecc_uncorrected=0,
        last_xid=0,
    )


@pytest.mark.parametrize("huge", ["1e308", "1e19", "9" * 300])
def test_counts_beyond_all_bounds_are_unknown_and_fit_every_message(huge: str) -> None:
    seen = read(page(("DCGM_FI_DEV_FB_USED", huge), ("DCGM_FI_DEV_XID_ERRORS", huge)))
    assert (seen.memory_used_bytes, seen.last_xid) == (None, None)
    assert msgspec.msgpack.encode(seen)


def test_rates_that_an_older_exporter_calls_counters_are_still_rates() -> None:
    older = CURRENT.replace("TX_BYTES gauge", "TX_BYTES counter")
    reader = DcgmReader()
    assert reader.read(older) == reader.read(older) == DcgmReader().read(CURRENT)


def test_names_and_units_of_each_release_mean_the_same() -> None:
    second = page(
        ("DCGM_FI_DEV_PCIE_TX_THROUGHPUT", 1250000),
        ("DCGM_FI_DEV_PCIE_RX_THROUGHPUT", 0),
        ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 4),
        ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", 4800),
    )
    seen = read(second)
    assert (seen.pcie_send_bytes_per_second, seen.pcie_receive_bytes_per_second) == (1.25e9, 0.0)
    assert seen.held_back_by == ("power cap",)
    assert seen.nvlink_both_bytes_per_second == 4800 * 1000 * 1024
    first = f'dcgm_gpu_utilization{{gpu="2",uuid="{A}"}} 87\ndcgm_fb_used{{gpu="2",uuid="{A}"}} 71000\n'
    oldest = read(first)
    assert (oldest.ordinal, oldest.used_ratio, oldest.memory_used_bytes) == (2, 0.87, 71000 << 20)
    assert oldest.memory_total_bytes is None, "half of it is not told"


@pytest.mark.parametrize(
    "blank",
    ["NaN", "-nan", "+Inf", "2147483632", "2147483635", "140737488355328.000000", "140737488355331",
     "9223372036854775792", "9223372036854775794", "9.223372036854775807e+18", "-1"],
)  # fmt: skip
def test_blanks_of_dcgm_are_unknown_and_zero_is_zero(blank: str) -> None:
    names = ("GPU_UTIL", "POWER_USAGE", "GPU_TEMP", "XID_ERRORS", "FB_USED", "PCIE_REPLAY_COUNTER")
    seen = read(page(*((f"DCGM_FI_DEV_{name}", blank) for name in names)))
    assert seen == AcceleratorLoad(uuid=A, sources=("dcgm",))
    seen = read(page(*((f"DCGM_FI_DEV_{name}", 0) for name in names)))
    assert (seen.used_ratio, seen.power_watts, seen.last_xid, seen.memory_used_bytes) == (0.0, 0.0, 0, 0)
    assert (seen.held_back_by, seen.nvlink_errors) == (None, None)


def test_more_than_all_of_the_time_is_no_share_of_it() -> None:
    assert read(page(("DCGM_FI_DEV_GPU_UTIL", 180))).used_ratio is None


def test_cards_are_told_apart_and_lines_of_no_card_are_left_out() -> None:
    text = page(("DCGM_FI_DEV_GPU_TEMP", 50)) + page(("DCGM_FI_DEV_GPU_TEMP", 60), uuid=B, gpu=1)
    text += 'DCGM_FI_DEV_GPU_TEMP{gpu="7"} 99\nDCGM_FI_DEV_GPU_TEMP{UUID=""} 98\n'
    found = DcgmReader().read(text)
    assert [(card.uuid, card.ordinal, card.temperature_celsius) for card in found] == [(A, 0, 50), (B, 1, 60)]


def test_slices_repeat_what_is_their_cards_and_do_not_stand_for_the_rest() -> None:
    rows = (
        ("DCGM_FI_DEV_GPU_TEMP", 50), ("DCGM_FI_DEV_POWER_USAGE", 300.0),
        ("DCGM_FI_DEV_FB_USED", 9000), ("DCGM_FI_PROF_PCIE_TX_BYTES", 7.0),
    )  # fmt: skip
    text = "".join(page(*rows, more=f',GPU_I_PROFILE="3g.40gb",GPU_I_ID="{part}"') for part in (1, 2))
    seen = read(text)
    assert (seen.temperature_celsius, seen.power_watts) == (50.0, 300.0)
    assert (seen.memory_used_bytes, seen.pcie_send_bytes_per_second) == (None, None)


@pytest.mark.parametrize("text", ["", "# HELP x y\n", "<html>no such page</html>\n", 'up{job="dcgm"} 1\n'])
def test_page_without_cards_tells_of_none(text: str) -> None:
    assert DcgmReader().read(text) == ()


@given(st.text(max_size=200))
def test_no_text_makes_the_reader_raise(text: str) -> None:
    DcgmReader().read(text)
    DcgmReader().read(f'DCGM_FI_DEV_GPU_UTIL{{gpu="{text}",UUID="x"}} {text}\n')
