"""What becomes of a minute of a machine: unknown stays unknown, and nonsense of one node spoils nothing."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from exaserve_ops.telemetry.domain.machine_loads import nvlink_bytes_per_second, nvlink_use, pcie_use
from exaserve_ops.telemetry.domain.node_history import draw_history
from exaserve_ops.telemetry.domain.node_minutes import (
    CARD_MEASURES,
    MOST_CARDS,
    PLAIN_MEASURES,
    NodeSamples,
)
from workers.protocol.machine import AcceleratorLoad, RdmaRate
from workers.protocol.observed import HostTelemetry, InterfaceRate

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def card(ordinal: int = 0, **values: Any) -> AcceleratorLoad:
    return AcceleratorLoad(uuid=f"GPU-{ordinal}", ordinal=ordinal, **values)


def test_minute_has_means_of_what_adds_up_and_peaks_of_what_hurts() -> None:
    samples = NodeSamples()
    for used, sent in ((0.2, 1.0), (0.4, 9.0)):
        rate = InterfaceRate(
            receive_bytes_per_second=0.5, send_bytes_per_second=sent, link_bytes_per_second=10.0
        )
        port = RdmaRate(receive_bytes_per_second=2.0, send_bytes_per_second=1.0, link_bytes_per_second=4.0)
        samples.add_host(
            HostTelemetry(
                cpu_used_ratio=used, interfaces={"a": rate}, rdma={"b/1": port, "b/2": port},
                memory_used_bytes=30, memory_total_bytes=40,
            )
        )  # fmt: skip
    samples.add_requests([2, None], [1, 4])
    samples.add_requests([None], [None])
    for ttft in (0.1, 0.2, 3.0):
        samples.add_answer(ttft)
    plain = samples.summarise().plain
    assert plain["cpu_used_ratio"] == pytest.approx(0.3)
    assert (plain["network_used_ratio"], plain["rdma_used_ratio"]) == (0.9, 0.5)
    assert plain["rdma_receive_bytes_per_second"] == 4.0
    assert plain["memory_used_ratio"] == 0.75
    assert (plain["requests_running"], plain["requests_waiting"]) == (2.0, 5.0)
    assert (plain["ttft_p50_seconds"], plain["ttft_p99_seconds"]) == (0.2, 3.0)
    assert (plain["cpu_busiest_ratio"], plain["disk_read_bytes_per_second"]) == (None, None)


def test_engines_tell_of_first_tokens_where_no_gateway_did() -> None:
    samples = NodeSamples()
    samples.add_engine_ttfts([0.1, None, 0.3, 0.2], [1.0, None, 3.0])
    samples.add_engine_ttfts([0.4], [2.0])
    plain = samples.summarise().plain
    assert (plain["ttft_p50_seconds"], plain["ttft_p99_seconds"]) == (pytest.approx(0.3), 3.0)
    samples.add_answer(0.5)
    plain = samples.summarise().plain
    assert (plain["ttft_p50_seconds"], plain["ttft_p99_seconds"]) == (0.5, 0.5)


def test_node_that_says_nothing_has_no_zeros() -> None:
    samples = NodeSamples()
    samples.add_host(HostTelemetry())
    samples.add_requests([], [])
    load = samples.summarise()
    assert set(load.plain) == {measure.name for measure in PLAIN_MEASURES}
    assert set(load.plain.values()) == {None}
    assert (load.card_ordinals, load.cards) == ((), {})


def test_cards_stand_side_by_side_and_what_none_tells_is_left_out() -> None:
    samples = NodeSamples()
    samples.add_cards([card(3, used_ratio=0.5, held_back_by=("heat",)), card(1, power_watts=100.0)])
    samples.add_cards([card(3, used_ratio=1.0, held_back_by=())])
    load = samples.summarise()
    assert load.card_ordinals == (1, 3)
    assert load.cards == {
        "card_used_ratio": [None, 0.75],
        "card_power_watts": [100.0, None],
        "card_held_back_ratio": [None, 0.5],
    }


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf, 1e300])
def test_nonsense_of_one_node_is_left_out(nonsense: float) -> None:
    samples = NodeSamples()
    samples.add_host(HostTelemetry(cpu_used_ratio=nonsense, load1=nonsense))
    samples.add_cards(
        [card(-1, used_ratio=0.5), card(MOST_CARDS, used_ratio=0.5), card(0, used_ratio=nonsense)]
    )
    load = samples.summarise()
    assert (load.plain["cpu_used_ratio"], load.card_ordinals) == (None, ())


def test_use_of_links_is_of_the_fuller_direction_and_unknown_without_their_speed() -> None:
    link = {"pcie_link_bytes_per_second": 100.0, "nvlink_link_bytes_per_second": 200.0}
    both = card(pcie_receive_bytes_per_second=10.0, pcie_send_bytes_per_second=80.0, **link)
    assert pcie_use(both) == 0.8
    assert pcie_use(card(pcie_receive_bytes_per_second=10.0)) is None
    assert (nvlink_use(both), nvlink_bytes_per_second(both)) == (None, None)
    merged = card(nvlink_both_bytes_per_second=100.0, **link)
    assert (nvlink_use(merged), nvlink_bytes_per_second(merged)) == (0.25, 100.0)


def row(minute: int, **values: Any) -> Any:
    names = {measure.name: None for measure in (*PLAIN_MEASURES, *CARD_MEASURES)}
    return SimpleNamespace(**{"minute": START + minute * MINUTE, "card_ordinals": [], **names, **values})


def test_lines_have_gaps_where_nothing_was_written_and_none_for_what_nobody_tells() -> None:
    rows = [
        row(0, cpu_used_ratio=0.5, card_ordinals=[0, 2], card_used_ratio=[0.1, None]),
        row(2, cpu_used_ratio=0.0, card_ordinals=[0, 2], card_used_ratio=[0.3, 0.4]),
        row(9, cpu_used_ratio=1.0),
    ]
    seen = draw_history(rows, since=START, until=START + 3 * MINUTE, step=MINUTE)
    assert seen.at == (START, START + MINUTE, START + 2 * MINUTE)
    assert [(line.measure.name, line.accelerator, line.values) for line in seen.lines] == [
        ("cpu_used_ratio", None, (0.5, None, 0.0)),
        ("card_used_ratio", 0, (0.1, None, 0.3)),
        ("card_used_ratio", 2, (None, None, 0.4)),
    ]


def test_longer_steps_keep_means_and_peaks() -> None:
    rows = [row(n, cpu_used_ratio=n / 10, requests_waiting=float(n)) for n in range(6)]
    seen = draw_history(rows, since=START, until=START + 5.5 * MINUTE, step=3 * MINUTE)
    lines = {line.measure.name: line.values for line in seen.lines}
    assert lines == {
        "cpu_used_ratio": (pytest.approx(0.1), pytest.approx(0.4)),
        "requests_waiting": (2.0, 5.0),
    }
    assert draw_history(rows, since=START, until=START, step=MINUTE).at == ()
