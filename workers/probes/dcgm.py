"""Loads of NVIDIA cards from the text page of a `dcgm-exporter`. Pure, and nothing raises.

Names and units changed from release to release; `_NAMES` has them all. Types do not count: `DCGM_FI_PROF_*`
bytes and the bandwidth of NVLink are rates, whatever older exporters declare them to be. Where DCGM has no
value, exporters leave the line out, write NaN, or write one of DCGM's own numbers for "blank": all mean
that nothing is known, and a 0 means 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from workers.engines.exposition import Exposition, PageReader, Series
from workers.probes.card_loads import held_back_by
from workers.protocol.machine import AcceleratorLoad

SOURCE = "dcgm"
_MEBIBYTE = 1 << 20
_BEYOND = float(1 << 62)
_UUID_LABELS = ("UUID", "uuid")
_ORDINAL_LABEL = "gpu"
_SLICE_LABEL = "GPU_I_ID"
_BLANKS = ((0x7FFFFFF0, 16), (1 << 47, 16), (0x7FFFFFFFFFFFFFF0, 1 << 10))
"""Where DCGM's blank numbers begin (32-bit, double, 64-bit) and how far they reach."""


@dataclass(frozen=True, slots=True)
class _Name:
    """One name of a quantity."""

    text: str
    scale: float = 1.0
    """Of its unit, to ours."""
    of_slices: bool = False
    """On a card that is cut into slices, each line tells of one slice alone."""
    releases: str = "2 and later"
    """Of the exporter, for people."""


_USED = (_Name("DCGM_FI_DEV_GPU_UTIL", 0.01), _Name("dcgm_gpu_utilization", 0.01, releases="1"))
_MEMORY_USED = (
    _Name("DCGM_FI_DEV_FB_USED", _MEBIBYTE, of_slices=True),
    _Name("dcgm_fb_used", _MEBIBYTE, releases="1"),
)
_MEMORY_FREE = (
    _Name("DCGM_FI_DEV_FB_FREE", _MEBIBYTE, of_slices=True),
    _Name("dcgm_fb_free", _MEBIBYTE, releases="1"),
)
_MEMORY_RESERVED = (_Name("DCGM_FI_DEV_FB_RESERVED", _MEBIBYTE, of_slices=True, releases="3 and later"),)
_PCIE_SENT = (
    _Name("DCGM_FI_PROF_PCIE_TX_BYTES", of_slices=True),
    _Name("DCGM_FI_DEV_PCIE_TX_THROUGHPUT", 1e3, releases="2"),
    _Name("dcgm_pcie_tx_throughput", 1e3, releases="1"),
)
_PCIE_RECEIVED = (
    _Name("DCGM_FI_PROF_PCIE_RX_BYTES", of_slices=True),
    _Name("DCGM_FI_DEV_PCIE_RX_THROUGHPUT", 1e3, releases="2"),
    _Name("dcgm_pcie_rx_throughput", 1e3, releases="1"),
)
_PCIE_REPLAYS = (_Name("DCGM_FI_DEV_PCIE_REPLAY_COUNTER"), _Name("dcgm_pcie_replay_counter", releases="1"))
_LINK_SENT = (_Name("DCGM_FI_PROF_NVLINK_TX_BYTES", of_slices=True),)
_LINK_RECEIVED = (_Name("DCGM_FI_PROF_NVLINK_RX_BYTES", of_slices=True),)
_LINK_BOTH = (
    # Thousands of KiB a second, of both directions.
    _Name("DCGM_FI_DEV_NVLINK_THROUGHPUT_TOTAL", 1.024e6, releases="4.3 and later"),
    _Name("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", 1.024e6),
)
_LINK_ERRORS = (
    (_Name("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),),
    (_Name("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL"),),
    (_Name("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),),
)
_POWER = (_Name("DCGM_FI_DEV_POWER_USAGE"), _Name("dcgm_power_usage", releases="1"))
_POWER_LIMIT = (_Name("DCGM_FI_DEV_ENFORCED_POWER_LIMIT"), _Name("DCGM_FI_DEV_POWER_MGMT_LIMIT"))
_TEMPERATURE = (_Name("DCGM_FI_DEV_GPU_TEMP"), _Name("dcgm_gpu_temp", releases="1"))
_CLOCKS = (
    _Name("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", releases="3.3 and later"),
    _Name("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", releases="before 3.3"),
)
_ECC = (_Name("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"), _Name("dcgm_ecc_dbe_volatile_total", releases="1"))
_XID = (_Name("DCGM_FI_DEV_XID_ERRORS"), _Name("dcgm_xid_errors", releases="1"))
_NAMES = (
    *(_USED, _MEMORY_USED, _MEMORY_FREE, _MEMORY_RESERVED, _PCIE_SENT, _PCIE_RECEIVED, _PCIE_REPLAYS),
    *(_LINK_SENT, _LINK_RECEIVED, _LINK_BOTH, *_LINK_ERRORS),
    *(_POWER, _POWER_LIMIT, _TEMPERATURE, _CLOCKS, _ECC, _XID),
)


class DcgmReader:
    """Reads pages of one exporter; it remembers how their lines begin."""

    def __init__(self) -> None:
        self._reader = PageReader(names={name.text for names in _NAMES for name in names})

    def read(self, page: str) -> tuple[AcceleratorLoad, ...]:
        """Loads of the cards on the page; none where it tells of no card."""
        cards = _by_card(self._reader.read(page))
        return tuple(_load(uuid, told) for uuid, told in cards.items())


class _Told:
    """The lines of one card."""

    def __init__(self) -> None:
        self.ordinal = 0
        self.sliced = False
        self._values: dict[str, float] = {}

    def take(self, name: str, line: Series) -> None:
        """Take a value in, unless it says that there is none."""
        number = line.labels.get(_ORDINAL_LABEL, "")
        self.ordinal = int(number) if number.isdecimal() and len(number) < len("1000") else self.ordinal
        self.sliced = self.sliced or bool(line.labels.get(_SLICE_LABEL))
        if line.value is not None and line.value >= 0 and not _is_blank(line.value):
            # Lines of slices repeat what is told of their card.
            self._values[name] = max(line.value, self._values.get(name, 0.0))

    def find(self, names: Iterable[_Name]) -> float | None:
        """By the first of several names that has a value."""
        for name in names:
            if name.text in self._values and not (self.sliced and name.of_slices):
                return self._values[name.text] * name.scale
        return None

    def count(self, names: Iterable[_Name]) -> int | None:
        """The same, of a whole number; `None` for more than any message holds."""
        found = self.find(names)
        return int(found) if found is not None and found < _BEYOND else None


def _by_card(page: Exposition) -> Mapping[str, _Told]:
    cards: defaultdict[str, _Told] = defaultdict(_Told)
    for name, lines in page.series.items():
        for line in lines:
            uuid = next((line.labels[label] for label in _UUID_LABELS if line.labels.get(label)), "")
            if uuid:
                cards[uuid].take(name, line)
    return cards


def _load(uuid: str, told: _Told) -> AcceleratorLoad:
    used, free = told.count(_MEMORY_USED), told.count(_MEMORY_FREE)
    sent, received = told.find(_LINK_SENT), told.find(_LINK_RECEIVED)
    errors = [count for names in _LINK_ERRORS if (count := told.count(names)) is not None]
    mask = told.count(_CLOCKS)
    ratio = told.find(_USED)
    return AcceleratorLoad(
        uuid=uuid,
        ordinal=told.ordinal,
        sources=(SOURCE,),
        used_ratio=ratio if ratio is None or ratio <= 1 else None,
        memory_used_bytes=used,
        memory_total_bytes=None
        if used is None or free is None
        else used + free + (told.count(_MEMORY_RESERVED) or 0),
        pcie_receive_bytes_per_second=told.find(_PCIE_RECEIVED),
        pcie_send_bytes_per_second=told.find(_PCIE_SENT),
        pcie_replays=told.count(_PCIE_REPLAYS),
        nvlink_receive_bytes_per_second=received,
        nvlink_send_bytes_per_second=sent,
        nvlink_both_bytes_per_second=told.find(_LINK_BOTH) if sent is None and received is None else None,
        nvlink_errors=sum(errors) if errors else None,
        power_watts=told.find(_POWER),
        power_limit_watts=told.find(_POWER_LIMIT),
        temperature_celsius=told.find(_TEMPERATURE),
        held_back_by=None if mask is None else held_back_by(mask),
        ecc_uncorrected=told.count(_ECC),
        last_xid=told.count(_XID),
    )


def _is_blank(value: float) -> bool:
    return any(start <= value < start + length for start, length in _BLANKS)
