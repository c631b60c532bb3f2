"""Recorded minutes of a node with eight cards, for tests of what shows them."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from exaserve_ops.telemetry.models import NodeMinute

CARDS = 8


def record_machine(
    node_id: UUID, *, until: datetime, minutes: int, gap: range = range(0), cards: int = CARDS, **changes: Any
) -> None:
    """Write minutes up to `until`, oldest first; those of `gap` are missing. `changes` replace columns."""
    first = until.replace(second=0, microsecond=0) - timedelta(minutes=minutes)
    rows = [
        NodeMinute(node_id=node_id, minute=first + timedelta(minutes=n), **(_minute(n, cards) | changes))
        for n in range(minutes)
        if n not in gap
    ]
    NodeMinute.objects.bulk_create(rows)


def _minute(n: int, cards: int) -> dict[str, Any]:
    wave = (1 + math.sin(n / 7)) / 2
    loads = [wave * (0.7 + 0.04 * card) for card in range(cards)]
    return {
        "ttft_p50_seconds": 0.12 + 0.1 * wave,
        "ttft_p99_seconds": 0.4 + 1.8 * wave**3,
        "requests_waiting": round(20 * wave**4),
        "requests_running": round(48 * wave),
        "cpu_used_ratio": 0.1 + 0.1 * wave,
        "cpu_busiest_ratio": 0.35 + 0.5 * wave,
        "cpu_stalled_ratio": 0.0,
        "memory_used_ratio": 0.4,
        "network_used_ratio": 0.9 * wave,
        "network_receive_bytes_per_second": 1e9 * wave,
        "network_send_bytes_per_second": 2e9 * wave,
        "disk_read_bytes_per_second": 3e8 * wave,
        "disk_write_bytes_per_second": 1e6,
        "io_stalled_ratio": 0.001,
        "card_ordinals": list(range(cards)),
        "card_used_ratio": loads,
        "card_memory_ratio": [0.8 + 0.01 * card for card in range(cards)],
        "card_pcie_ratio": [load / 3 for load in loads],
        "card_pcie_bytes_per_second": [20e9 * load for load in loads],
        "card_nvlink_ratio": [load / 2 for load in loads],
        "card_nvlink_bytes_per_second": [200e9 * load for load in loads],
        "card_power_watts": [120 + 560 * load for load in loads],
        "card_temperature_celsius": [38 + 40 * load for load in loads],
        "card_held_back_ratio": [float(card == 3 and wave > 0.8) for card in range(cards)],
    }
