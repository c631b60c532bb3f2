"""Loads of NVIDIA cards, by the driver's own management library. It makes no CUDA context.

`python -m workers.probes.nvml SECONDS` writes one line of JSON each so many seconds, until its input ends.
It is a process of its own: a driver that hangs holds its callers in a sleep that not even SIGKILL ends, and
must not hold the agent.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pynvml

from workers.probes.card_loads import held_back_by, pcie_link
from workers.protocol.machine import AcceleratorLoad

SOURCE = "nvml"
_ALL_LINKS = 0xFFFFFFFF
_KILOBYTE, _KIBIBYTE = 1000, 1024
_MILLI = 1e-3
_UNCORRECTED, _VOLATILE = 1, 0
_MOST_NOTES = 8
_MOST_XIDS_AT_ONCE = 64

_PCIE_SENT, _PCIE_RECEIVED = pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES
_LINK_SENT = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
_LINK_RECEIVED = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
_LINK_COUNT, _LINK_SPEED = pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
_LINK_ERRORS = (
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
)
_FIELDS = (_PCIE_SENT, _PCIE_RECEIVED, _LINK_COUNT, _LINK_SPEED, *_LINK_ERRORS)
_FIELDS_OVER_LINKS = (_LINK_SENT, _LINK_RECEIVED)
_VALUE_OF_TYPE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

_NOT_THERE = frozenset((
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
))  # fmt: skip
"""The card, or a driver of its age, has no such figure: nothing is wrong."""
_OURS = frozenset({"uuid", "ordinal", "sources", "age_seconds", "last_xid", "notes"})
"""Fields of a load that stand there though the card answers nothing."""


@dataclass(slots=True)
class _Card:
    """One card, and what its counters stood at."""

    handle: Any
    uuid: str
    ordinal: int
    read_at_seconds: float = 0.0
    counters: dict[int, int] = field(default_factory=dict)
    last_xid: int | None = None
    notes: list[str] = field(default_factory=list)

    def ask(self, label: str, *ways: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the library answers
        """The first of several ways to the same figure that has it; a fault is noted."""
        for way in ways:
            try:
                return way()
            except pynvml.NVMLError as error:
                if error.value not in _NOT_THERE:
                    self._note(label, str(error))
                    return None
        return None

    def _note(self, label: str, fault: str) -> None:
        """A card that is gone answers everything alike: that is said once."""
        if len(self.notes) < _MOST_NOTES and not any(note.endswith(fault) for note in self.notes):
            self.notes.append(f"{label}: {fault}"[:80])


class NvmlReader:
    """All cards that the driver shows. Rates are since the reading before, so the first has none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the library. Raises `pynvml.NVMLError` where there is none, or no driver."""
        self._clock = clock
        pynvml.nvmlInit()
        self._cards = [
            card for i in range(pynvml.nvmlDeviceGetCount()) if (card := _open_card(i)) is not None
        ]
        self._errors = self._watch_errors()

    def read(self) -> tuple[AcceleratorLoad, ...]:
        """Read every card. Never raises: what is not told is `None`, and faults are in its notes."""
        self._take_errors()
        return tuple(self._read_card(card) for card in self._cards)

    def _read_card(self, card: _Card) -> AcceleratorLoad:
        card.notes.clear()
        handle, now = card.handle, self._clock()
        fields = _read_fields(card)
        rates = _rates(card, fields, now)
        memory = card.ask("memory", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
        used = card.ask("use", lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        mask = card.ask("clocks", lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
                        lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # fmt: skip
        links = fields.get(_LINK_COUNT)
        up = None if links is None else sum(_is_up(card, link) for link in range(links))
        link_speed = fields.get(_LINK_SPEED)
        errors = [fields[name] for name in _LINK_ERRORS if name in fields]
        return AcceleratorLoad(
            uuid=card.uuid,
            ordinal=card.ordinal,
            sources=(SOURCE,),
            used_ratio=None if used is None else used / 100,
            memory_used_bytes=memory and memory.used,
            memory_total_bytes=memory and memory.total,
            pcie_receive_bytes_per_second=_pcie_rate(card, fields, rates, _PCIE_RECEIVED),
            pcie_send_bytes_per_second=_pcie_rate(card, fields, rates, _PCIE_SENT),
            pcie_link_bytes_per_second=pcie_link(
                card.ask("PCIe link", lambda: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
                card.ask("PCIe link", lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            ),
            pcie_replays=card.ask("PCIe replays", lambda: pynvml.nvmlDeviceGetPcieReplayCounter(handle)),
            nvlinks=links,
            nvlinks_up=up,
            nvlink_receive_bytes_per_second=_scaled(rates.get(_LINK_RECEIVED), _KIBIBYTE) if links else None,
            nvlink_send_bytes_per_second=_scaled(rates.get(_LINK_SENT), _KIBIBYTE) if links else None,
            nvlink_link_bytes_per_second=up * link_speed * 1e6 if up and link_speed else None,
            nvlink_errors=sum(errors) if errors and links else None,
            power_watts=_scaled(card.ask("power", lambda: pynvml.nvmlDeviceGetPowerUsage(handle)), _MILLI),
            power_limit_watts=_scaled(
                card.ask("power limit", lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)), _MILLI
            ),
            temperature_celsius=card.ask(
                "temperature",
                lambda: pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU),
                lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            ),
            held_back_by=None if mask is None else held_back_by(mask),
            ecc_uncorrected=card.ask(
                "ECC", lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE)
            ),
            last_xid=card.last_xid,
            notes=tuple(card.notes),
        )

    def _watch_errors(self) -> Any:  # noqa: ANN401 - the library's handle
        """Have the driver's errors on cards queued for us; `None` where it tells nobody."""
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return None
        for card in self._cards:
            try:
                pynvml.nvmlDeviceRegisterEvents(card.handle, pynvml.nvmlEventTypeXidCriticalError, events)
            except pynvml.NVMLError:
                continue
            card.last_xid = 0
        return events

    def _take_errors(self) -> None:
        """Take what is queued, without waiting."""
        for _ in range(_MOST_XIDS_AT_ONCE if self._errors is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait(self._errors, 0)
            except pynvml.NVMLError:
                return  # a timeout: nothing is queued
            for card in self._cards:
                if _address(card.handle) == _address(event.device):
                    card.last_xid = int(event.eventData)


def _tells(load: AcceleratorLoad) -> bool:
    """Whether the card has told anything: some have no memory of their own, or no links, but none nothing."""
    return any(getattr(load, name) is not None for name in load.__struct_fields__ if name not in _OURS)


def _open_card(index: int) -> _Card | None:
    """`None` for a card that cannot be asked: the survey by the vendor's tool says why."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return _Card(handle, pynvml.nvmlDeviceGetUUID(handle), index)
    except pynvml.NVMLError:
        return None


def _read_fields(card: _Card) -> dict[int, int]:
    wanted = [*((name, 0) for name in _FIELDS), *((name, _ALL_LINKS) for name in _FIELDS_OVER_LINKS)]
    values = card.ask("counters", lambda: pynvml.nvmlDeviceGetFieldValues(card.handle, wanted))
    return {
        value.fieldId: int(getattr(value.value, _VALUE_OF_TYPE[value.valueType]))
        for value in values or ()
        if value.nvmlReturn == pynvml.NVML_SUCCESS and value.valueType < len(_VALUE_OF_TYPE)
    }


def _rates(card: _Card, fields: Mapping[int, int], now: float) -> dict[int, float]:
    """Of the counters that only grew since the reading before: one that fell was reset, or went round."""
    seconds = now - card.read_at_seconds
    before, card.counters, card.read_at_seconds = card.counters, dict(fields), now
    if seconds <= 0:
        return {}
    return {
        name: (value - before[name]) / seconds
        for name, value in fields.items()
        if name in before and value >= before[name]
    }


def _pcie_rate(
    card: _Card, fields: Mapping[int, int], rates: Mapping[int, float], counter: int
) -> float | None:
    """From its byte counter; a driver that has none measures for 20 ms instead."""
    if counter in fields:
        return rates.get(counter)
    way = pynvml.NVML_PCIE_UTIL_TX_BYTES if counter == _PCIE_SENT else pynvml.NVML_PCIE_UTIL_RX_BYTES
    return _scaled(card.ask("PCIe", lambda: pynvml.nvmlDeviceGetPcieThroughput(card.handle, way)), _KILOBYTE)


def _is_up(card: _Card, link: int) -> bool:
    return bool(card.ask("NVLink", lambda: pynvml.nvmlDeviceGetNvLinkState(card.handle, link)))


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _address(handle: Any) -> int:  # noqa: ANN401 - a ctypes pointer
    return pynvml.cast(handle, pynvml.c_void_p).value or 0


def main(arguments: Sequence[str]) -> int:
    """Write what the cards tell until the input ends, which it does with the agent, or no card answers."""
    pause_seconds = float(arguments[0])
    try:
        reader = NvmlReader()
    except pynvml.NVMLError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    encoder = msgspec.json.Encoder()
    while True:
        loads = reader.read()
        sys.stdout.buffer.write(encoder.encode(loads) + b"\n")
        sys.stdout.buffer.flush()
        if not any(map(_tells, loads)):
            # A driver that was replaced, or cards that were reset: only a library opened anew knows them.
            sys.stderr.write("no card answers\n")
            return 1
        if select.select([sys.stdin], [], [], pause_seconds)[0]:
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
