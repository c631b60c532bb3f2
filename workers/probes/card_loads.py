"""What several sources tell of the same cards, made one. Pure.

A `dcgm-exporter` page comes first where an operator configured one: its figures are averages over an
interval, and a card's profiling counters serve one reader. NVML fills in what that leaves out, and the
survey by the vendors' tools, a minute old, what both do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from workers.probes.devices import Device
from workers.protocol.machine import AcceleratorLoad

MOST_CARDS = 32
_LANE_BYTES_PER_SECOND = {1: 250e6, 2: 500e6, 3: 984.6e6, 4: 1969.2e6, 5: 3938.5e6, 6: 7562.5e6}
"""What one lane carries each way, by PCIe generation, coding already taken off."""
_REASONS = (
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x20, "heat"),
    (0x40, "heat"),
    (0x80, "power brake"),
)
"""Bits of NVML's and DCGM's mask that tell of a card that could do more. An idle one is not held back,
nor is one whose clocks somebody has set."""
_TOGETHER = (
    ("memory_used_bytes", "memory_total_bytes"),
    ("pcie_receive_bytes_per_second", "pcie_send_bytes_per_second"),
    ("nvlink_receive_bytes_per_second", "nvlink_send_bytes_per_second", "nvlink_both_bytes_per_second"),
    ("nvlinks", "nvlinks_up"),
    ("power_watts", "power_limit_watts"),
)
"""Fields that mean something beside one another: they come from the first source that tells any."""
_ABOUT = frozenset(("uuid", "ordinal", "sources", "age_seconds", "notes"))
_ALONE = tuple(
    (name,)
    for name in AcceleratorLoad.__struct_fields__
    if name not in _ABOUT and not any(name in group for group in _TOGETHER)
)


def merge_loads(sources: Sequence[Iterable[AcceleratorLoad]]) -> tuple[AcceleratorLoad, ...]:
    """One load for each card that any source tells of; earlier sources win, field by field."""
    by_card: dict[str, list[AcceleratorLoad]] = {}
    for loads in sources:
        for load in loads:
            by_card.setdefault(load.uuid, []).append(load)
    merged = sorted((_merge(told) for told in by_card.values()), key=lambda load: (load.ordinal, load.uuid))
    return tuple(merged[:MOST_CARDS])


def _merge(told: Sequence[AcceleratorLoad]) -> AcceleratorLoad:
    values: dict[str, Any] = {}
    used: list[AcceleratorLoad] = []
    for group in (*_TOGETHER, *_ALONE):
        for load in told:
            found = {name: getattr(load, name) for name in group}
            if any(value is not None for value in found.values()):
                values |= found
                used.append(load)
                break
    used = [load for load in told if load in used]
    return AcceleratorLoad(
        uuid=told[0].uuid,
        # A page numbers the cards that it sees; the vendor's library all of them.
        ordinal=told[-1].ordinal,
        sources=tuple(name for load in used for name in load.sources),
        age_seconds=max((load.age_seconds for load in used), default=0.0),
        notes=tuple(dict.fromkeys(note for load in told for note in load.notes)),
        **values,
    )


def loads_of_survey(devices: Iterable[Device], age_seconds: float) -> tuple[AcceleratorLoad, ...]:
    """What the vendors' tools said of whole cards at the last survey, the last resort."""
    tools = {"cuda": "nvidia-smi", "rocm": "amd-smi", "xpu": "xpu-smi"}
    return tuple(
        AcceleratorLoad(
            uuid=device.uuid,
            ordinal=device.ordinal or 0,
            sources=(tools[device.kind],),
            age_seconds=age_seconds,
            used_ratio=device.utilization_ratio,
            memory_used_bytes=device.memory_used_bytes,
            memory_total_bytes=device.memory_bytes,
            pcie_link_bytes_per_second=pcie_link(
                device.pcie_generation_max or device.pcie_generation, device.pcie_width
            ),
            power_watts=device.power_watts,
            power_limit_watts=device.power_limit_watts,
            temperature_celsius=device.temperature_celsius,
            ecc_uncorrected=device.ecc_uncorrected_count,
        )
        for device in devices
        if not device.parent_uuid and device.kind in tools
    )


def aged(loads: Iterable[AcceleratorLoad], seconds: float) -> tuple[AcceleratorLoad, ...]:
    """The same, so much later."""
    return tuple(
        msgspec.structs.replace(load, age_seconds=round(load.age_seconds + seconds, 1)) for load in loads
    )


def pcie_link(generation: int | None, lanes: int | None) -> float | None:
    """Bytes a second each way of a PCIe link; `None` for what is not known of it."""
    lane = _LANE_BYTES_PER_SECOND.get(generation or 0)
    return lane * lanes if lane is not None and lanes else None


def held_back_by(mask: int) -> tuple[str, ...]:
    """Why a card's clocks are low, in words, of the mask that NVML and DCGM tell."""
    return tuple(dict.fromkeys(word for bit, word in _REASONS if mask & bit))
