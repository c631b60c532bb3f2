"""A FAKE of NVIDIA's management library, for machines without a driver.

It stands in at the ctypes boundary, below NVIDIA's own binding: each function is a real C function pointer
with the prototype of `nvml.h`, declared here once more, and answers through the caller's pointers.

What it cannot show: which figures a real driver has, and how long it takes.

`python nvml_library.py CARDS SECONDS` runs our reader over so many cards; `hang` in place of a number of
cards never answers.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pynvml

NOT_SUPPORTED, NOT_FOUND, TIMEOUT, GPU_IS_LOST = 3, 6, 10, 15
ALL_LINKS = 0xFFFFFFFF
_P, _I, _U, _A = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64
_FIELD = struct.Struct("IIqqIIQ")
"""fieldId, scopeId, timestamp, latencyUsec, valueType, nvmlReturn, value."""
_UNSIGNED_LONG_LONG = 3
_XID_EVENT = 0x8
_EVENT = struct.Struct("PQQII")
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "nvmlInitWithFlags": (_U,),
    "nvmlDeviceGetCount_v2": (_P,),
    "nvmlDeviceGetHandleByIndex_v2": (_U, _P),
    "nvmlDeviceGetUUID": (_P, _P, _U),
    "nvmlDeviceGetMemoryInfo": (_P, _P),
    "nvmlDeviceGetUtilizationRates": (_P, _P),
    "nvmlDeviceGetFieldValues": (_P, _I, _P),
    "nvmlDeviceGetNvLinkState": (_P, _U, _P),
    "nvmlDeviceGetTotalEccErrors": (_P, _U, _U, _P),
    "nvmlDeviceGetPcieThroughput": (_P, _U, _P),
    "nvmlDeviceGetTemperature": (_P, _U, _P),
    "nvmlDeviceGetTemperatureV": (_P, _P),
    "nvmlEventSetCreate": (_P,),
    "nvmlDeviceRegisterEvents": (_P, _A, _P),
    "nvmlEventSetWait_v2": (_P, _P, _U),
}
_PLAIN: dict[str, tuple[str, Any]] = {
    "nvmlDeviceGetCurrentClocksEventReasons": ("clocks_mask", _A),
    "nvmlDeviceGetCurrentClocksThrottleReasons": ("clocks_mask", _A),
    "nvmlDeviceGetMaxPcieLinkGeneration": ("pcie_generation", _U),
    "nvmlDeviceGetCurrPcieLinkWidth": ("pcie_lanes", _U),
    "nvmlDeviceGetPcieReplayCounter": ("pcie_replays", _U),
    "nvmlDeviceGetPowerUsage": ("power_milliwatts", _U),
    "nvmlDeviceGetEnforcedPowerLimit": ("power_limit_milliwatts", _U),
}
"""Functions of a device and a pointer: which value, of which C type. A value of `None` is not supported."""


class AnsweredError(Exception):
    """A call is answered with an error."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class FakeCard:
    """What one card answers."""

    uuid: str
    used_percent: int | None = 40
    memory_used_bytes: int = 30 << 30
    memory_total_bytes: int | None = 80 << 30
    """`None`: it shares the host's memory, and is asked in vain for its own."""
    clocks_mask: int | None = 0
    pcie_generation: int | None = 5
    pcie_lanes: int | None = 16
    pcie_replays: int | None = 0
    power_milliwatts: int | None = 310_500
    power_limit_milliwatts: int | None = 700_000
    temperature_celsius: int | None = 55
    ecc_uncorrected: int | None = 0
    pcie_kilobytes: dict[int, int] = field(default_factory=dict)
    """What is measured for a moment, by direction: of drivers that count no bytes."""
    fields: dict[tuple[int, int], int] = field(default_factory=dict)
    """Values by field and scope; what is not here is not supported."""
    links_down: set[int] = field(default_factory=set)
    tells_errors: bool = True
    lost: bool = False

    def count(self, name: int, value: int, *, over_links: bool = False) -> None:
        """Let a field stand at a value."""
        self.fields[name, ALL_LINKS if over_links else 0] = value


class FakeNvmlLibrary:
    """Stands in for `ctypes.CDLL("libnvidia-ml.so.1")`."""

    def __init__(self, cards: list[FakeCard], *, lacks: tuple[str, ...] = ()) -> None:
        """A driver with these cards, whose age shows in the functions that it lacks."""
        self.cards = cards
        self.xids: deque[tuple[int, int]] = deque()
        """Card and number of errors that nobody was told of yet."""
        self._listening: set[int] = set()
        for name, arguments in _PROTOTYPES.items():
            if name not in lacks:
                setattr(self, name, ctypes.CFUNCTYPE(_I, *arguments)(self._answering(name)))
        for name, (attribute, kind) in _PLAIN.items():
            if name not in lacks:
                setattr(self, name, ctypes.CFUNCTYPE(_I, _P, _P)(self._answering_plainly(attribute, kind)))

    def install(self) -> None:
        """Have NVIDIA's binding use this library from now on."""
        pynvml.nvmlLib = self
        pynvml._nvmlGetFunctionPointer_cache.clear()  # the binding keeps functions of the library before

    def _answering(self, name: str) -> Any:
        function = getattr(self, "_" + name.removeprefix("nvml").removesuffix("_v2"))

        def call(*arguments: Any) -> int:
            try:
                function(*arguments)
            except AnsweredError as error:
                return error.code
            return 0

        return call

    def _answering_plainly(self, attribute: str, kind: Any) -> Any:
        def call(device: int, answer: int) -> int:
            try:
                _put(answer, kind, getattr(self._card(device), attribute))
            except AnsweredError as error:
                return error.code
            return 0

        return call

    def _card(self, device: int) -> FakeCard:
        card = self.cards[device - 1]
        if card.lost:
            raise AnsweredError(GPU_IS_LOST)
        return card

    def _InitWithFlags(self, flags: int) -> None:  # noqa: N802 - as the library calls it
        assert flags == 0

    def _DeviceGetCount(self, answer: int) -> None:  # noqa: N802
        _put(answer, _U, len(self.cards))

    def _DeviceGetHandleByIndex(self, index: int, answer: int) -> None:  # noqa: N802
        if self.cards[index].lost:
            raise AnsweredError(GPU_IS_LOST)
        _put(answer, ctypes.c_size_t, index + 1)

    def _DeviceGetUUID(self, device: int, answer: int, length: int) -> None:  # noqa: N802
        text = self._card(device).uuid.encode() + b"\0"
        assert len(text) <= length
        ctypes.memmove(answer, text, len(text))

    def _DeviceGetMemoryInfo(self, device: int, answer: int) -> None:  # noqa: N802
        card = self._card(device)
        total, used = card.memory_total_bytes, card.memory_used_bytes
        if total is None:
            raise AnsweredError(NOT_SUPPORTED)
        ctypes.memmove(answer, struct.pack("QQQ", total, total - used, used), 24)

    def _DeviceGetUtilizationRates(self, device: int, answer: int) -> None:  # noqa: N802
        used = self._card(device).used_percent
        if used is None:
            raise AnsweredError(NOT_SUPPORTED)
        ctypes.memmove(answer, struct.pack("II", used, 0), 8)

    def _DeviceGetFieldValues(self, device: int, count: int, values: int) -> None:  # noqa: N802
        card = self._card(device)
        for place in range(count):
            address = values + place * _FIELD.size
            name, scope, *_ = _FIELD.unpack(ctypes.string_at(address, _FIELD.size))
            value = card.fields.get((name, scope))
            known = (_UNSIGNED_LONG_LONG, 0, value) if value is not None else (0, NOT_SUPPORTED, 0)
            ctypes.memmove(address, _FIELD.pack(name, scope, 0, 0, *known), _FIELD.size)

    def _DeviceGetNvLinkState(self, device: int, link: int, answer: int) -> None:  # noqa: N802
        _put(answer, _U, int(link not in self._card(device).links_down))

    def _DeviceGetTotalEccErrors(self, device: int, kind: int, since: int, answer: int) -> None:  # noqa: N802
        assert (kind, since) == (1, 0), "uncorrected ones since the driver was loaded"
        _put(answer, _A, self._card(device).ecc_uncorrected)

    def _DeviceGetPcieThroughput(self, device: int, direction: int, answer: int) -> None:  # noqa: N802
        _put(answer, _U, self._card(device).pcie_kilobytes.get(direction))

    def _DeviceGetTemperature(self, device: int, sensor: int, answer: int) -> None:  # noqa: N802
        assert sensor == 0
        _put(answer, _U, self._card(device).temperature_celsius)

    def _DeviceGetTemperatureV(self, device: int, answer: int) -> None:  # noqa: N802
        _put(answer + 8, _I, self._card(device).temperature_celsius)

    def _EventSetCreate(self, answer: int) -> None:  # noqa: N802
        _put(answer, ctypes.c_size_t, 0xE)

    def _DeviceRegisterEvents(self, device: int, kinds: int, events: int) -> None:  # noqa: N802
        assert (kinds, events) == (_XID_EVENT, 0xE)
        if not self._card(device).tells_errors:
            raise AnsweredError(NOT_SUPPORTED)
        self._listening.add(device)

    def _EventSetWait(self, events: int, answer: int, wait_milliseconds: int) -> None:  # noqa: N802
        assert (events, wait_milliseconds) == (0xE, 0), "nobody may wait here"
        if not self.xids:
            raise AnsweredError(TIMEOUT)
        place, number = self.xids.popleft()
        assert place + 1 in self._listening
        ctypes.memmove(answer, _EVENT.pack(place + 1, _XID_EVENT, number, 0, 0), _EVENT.size)


def _put(address: int, kind: Any, value: int | None) -> None:
    if value is None:
        raise AnsweredError(NOT_SUPPORTED)
    ctypes.cast(address, ctypes.POINTER(kind))[0] = value


if __name__ == "__main__":
    if sys.argv[1] == "hang":
        while True:
            time.sleep(60)
    from workers.probes.nvml import main

    FakeNvmlLibrary([FakeCard(f"GPU-{place}") for place in range(int(sys.argv[1]))]).install()
    sys.exit(main(sys.argv[2:]))
