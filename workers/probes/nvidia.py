"""Pages of nvidia-smi: `-q -x`, `-L`, `--query-gpu` and `--query-compute-apps`. Pure, and none raises."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from workers.probes.devices import AcceleratorProcess, Device, Inventory
from workers.probes.markup import Element, read_markup
from workers.probes.values import Fields, clean_text, parse_pid, parse_size_bytes

KIND = "cuda"
GPU_COLUMNS = (
    "index", "uuid", "name", "pci.bus_id", "memory.total", "memory.used",
    "temperature.gpu", "power.draw", "utilization.gpu",
)  # fmt: skip
"""What every release knows: one unknown column makes the tool refuse the whole question."""
PROCESS_COLUMNS = ("gpu_uuid", "pid", "used_memory")

_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,80}")
_LISTED_CARD = re.compile(r"GPU ([0-9]{1,4}): (.{0,120}?) \(UUID: (GPU-[0-9A-Za-z-]{1,60})\)")
_LISTED_SLICE = re.compile(r"MIG (\S{1,40})\s+Device\s+([0-9]{1,4}): \(UUID: (MIG-[0-9A-Za-z/-]{1,90})\)")
_LOST = re.compile(r"Unable to determine the device handle for GPU\s*([0-9A-Fa-f:.]{7,20}): ([^\r\n.]{1,80})")
_COMPLAINT = re.compile(
    r"NVIDIA-SMI has failed[^\r\n]{0,120}|Failed to initialize NVML: [^\r\n]{1,80}|No devices were found"
)
_LINK = "pci/pci_gpu_link_info"
_UNCORRECTED = (
    "dram_uncorrectable", "sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded",
    "double_bit/total",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ListedSlice:
    """A MIG slice as `-L` names it: the only place with its UUID on many releases."""

    uuid: str
    profile: str
    index: int


@dataclass(frozen=True, slots=True)
class ListedCard:
    """A card as `-L` names it."""

    uuid: str
    name: str
    ordinal: int
    slices: tuple[ListedSlice, ...] = ()


def parse_list(page: str) -> tuple[ListedCard, ...]:
    """Read `nvidia-smi -L`; other lines are passed over."""
    cards: list[ListedCard] = []
    for line in page.splitlines():
        card, part = _LISTED_CARD.search(line), _LISTED_SLICE.search(line)
        if card is not None:
            cards.append(ListedCard(card[3], card[2], int(card[1])))
        elif part is not None and cards:
            found = ListedSlice(part[3], part[1], int(part[2]))
            cards[-1] = replace(cards[-1], slices=(*cards[-1].slices, found))
    return tuple(cards)


def parse_complaints(page: str) -> tuple[str, ...]:
    """What the tool says about cards it lost, or about itself, in place of or beside a page."""
    lost = tuple(f"GPU {bus}: {clean_text(why)}" for bus, why in _LOST.findall(page))
    return lost + tuple(dict.fromkeys(clean_text(found) for found in _COMPLAINT.findall(page)))


def parse_query(page: str, listed: Sequence[ListedCard] = ()) -> Inventory:
    """Read `nvidia-smi -q -x`; `listed` (of `-L`) adds ordinals, and UUIDs and profiles of slices."""
    # At any depth: one end tag that is missing must not hide the cards after it.
    cards = read_markup(page).find_deep("gpu")
    by_uuid = {card.uuid: card for card in listed}
    notes = list(parse_complaints(page))
    devices: list[Device] = []
    processes: list[AcceleratorProcess] = []
    for position, element in enumerate(cards):
        card = _card(element, position, by_uuid)
        if not card.uuid:
            where = card.pci_bus_id or f"number {position}"
            notes.append(f"left out GPU {where}: no UUID ({'; '.join(card.notes)})")
            continue
        slices = _slices(element, card, by_uuid.get(card.uuid), notes)
        devices += [card, *slices.values()]
        processes += _processes(element, card.uuid, slices)
    if not cards and not notes:
        notes.append("nvidia-smi -q -x: no GPU on the page")
    return Inventory(tuple(devices), tuple(processes), tuple(notes))


def parse_gpu_csv(page: str, columns: Sequence[str] = ()) -> Inventory:
    """Read `--query-gpu … --format=csv`, with or without units; `columns` where it has no header."""
    lines = [line for line in page.splitlines() if line.strip()]
    notes = list(parse_complaints(page))
    if not columns and lines:
        # The header gives units too: `memory.total [MiB]`.
        columns = [re.sub(r"\s*\[.*", "", name.strip()) for name in lines.pop(0).split(",")]
    devices = []
    for line in lines:
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(columns):
            if not parse_complaints(line):
                notes.append(f"left out a line: {clean_text(line)[:60]}")
            continue
        device = _csv_device(dict(zip(columns, values, strict=True)))
        if device.uuid:
            devices.append(device)
        else:
            notes.append(f"left out an accelerator without UUID: {clean_text(line)[:60]}")
    return Inventory(tuple(devices), notes=tuple(notes))


def parse_process_csv(page: str) -> tuple[AcceleratorProcess, ...]:
    """Read `--query-compute-apps` of `PROCESS_COLUMNS`; lines without a pid are left out."""
    found = []
    for line in page.splitlines():
        values = [value.strip() for value in line.split(",")]
        pid = parse_pid(values[1]) if len(values) == len(PROCESS_COLUMNS) else None
        if pid is not None:
            found.append(AcceleratorProcess(values[0], pid, parse_size_bytes(values[2], unit="MiB")))
    return tuple(found)


def _card(element: Element, position: int, listed: dict[str, ListedCard]) -> Device:
    fields = Fields(element.value)
    uuid = _uuid(fields.text("uuid", "uuid", needed=True))
    known = listed.get(uuid)
    return Device(
        uuid=uuid,
        kind=KIND,
        name=fields.text("name", "product_name", needed=True) or (known.name if known else None),
        memory_bytes=fields.size_bytes(
            "memory", "fb_memory_usage/total", "memory_usage/total", unit="MiB", needed=True
        ),
        ordinal=known.ordinal if known else position,
        pci_bus_id=normal_bus_id(
            fields.text("pci_bus_id", "pci/pci_bus_id") or element.attributes.get("id", "")
        ),
        split=bool(fields.switch("mig_mode", "mig_mode/current_mig")),
        memory_used_bytes=fields.size_bytes(
            "memory_used", "fb_memory_usage/used", "memory_usage/used", unit="MiB"
        ),
        ecc_enabled=fields.switch("ecc_mode", "ecc_mode/current_ecc"),
        ecc_uncorrected_count=_sum_counts(fields, "ecc_errors/volatile/"),
        temperature_celsius=fields.number("temperature", "temperature/gpu_temp"),
        power_watts=_power(fields, "power", "instant_power_draw", "average_power_draw", "power_draw"),
        power_limit_watts=_power(
            fields, "power_limit", "current_power_limit", "enforced_power_limit", "power_limit"
        ),
        utilization_ratio=fields.ratio("utilization", "utilization/gpu_util"),
        pcie_generation=fields.count("pcie_generation", f"{_LINK}/pcie_gen/current_link_gen"),
        pcie_width=fields.count("pcie_width", f"{_LINK}/link_widths/current_link_width"),
        pcie_generation_max=fields.count("pcie_generation_max", f"{_LINK}/pcie_gen/max_link_gen"),
        pcie_width_max=fields.count("pcie_width_max", f"{_LINK}/link_widths/max_link_width"),
        notes=fields.notes,
    )


def _power(fields: Fields, label: str, *names: str) -> float | None:
    """Each of these stood in `power_readings` before release 535, in `gpu_power_readings` after."""
    groups = ("gpu_power_readings", "power_readings")
    return fields.number(label, *(f"{group}/{name}" for group in groups for name in names))


def _sum_counts(fields: Fields, prefix: str) -> int | None:
    counts = [fields.count("ecc_errors", prefix + name) for name in _UNCORRECTED]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _slices(
    element: Element, card: Device, listed: ListedCard | None, notes: list[str]
) -> dict[tuple[str, str], Device]:
    """The card's slices by their (GPU instance, compute instance)."""
    names = {part.index: part for part in (listed.slices if listed else ())}
    found: dict[tuple[str, str], Device] = {}
    for position, part in enumerate(element.find_all("mig_devices/mig_device")):
        fields = Fields(part.value)
        index = fields.count("index", "index")
        index = position if index is None else index
        name = names.get(index)
        uuid = _uuid(part.value("uuid")) or (name.uuid if name else "")
        if not uuid:
            notes.append(f"left out MIG device {index} of {card.uuid}: no UUID")
            continue
        profile = name.profile if name else clean_text(part.value("profile") or "")
        found[part.value("gpu_instance_id") or "", part.value("compute_instance_id") or ""] = Device(
            uuid=uuid,
            kind=KIND,
            name=f"{card.name or 'GPU'} MIG {profile}".strip(),
            memory_bytes=fields.size_bytes("memory", "fb_memory_usage/total", unit="MiB", needed=True),
            ordinal=card.ordinal,
            pci_bus_id=card.pci_bus_id,
            parent_uuid=card.uuid,
            profile=profile,
            pcie_generation=card.pcie_generation,
            pcie_width=card.pcie_width,
            memory_used_bytes=fields.size_bytes("memory_used", "fb_memory_usage/used", unit="MiB"),
            pcie_generation_max=card.pcie_generation_max,
            pcie_width_max=card.pcie_width_max,
            notes=fields.notes,
        )
    return found


def _processes(
    element: Element, uuid: str, slices: dict[tuple[str, str], Device]
) -> list[AcceleratorProcess]:
    found = []
    for row in element.find_all("processes/process_info"):
        pid = parse_pid(row.value("pid") or "")
        if pid is None:
            continue
        instance = (row.value("gpu_instance_id") or "", row.value("compute_instance_id") or "")
        part = slices.get(instance)
        found.append(
            AcceleratorProcess(
                part.uuid if part else uuid,
                pid,
                parse_size_bytes(row.value("used_memory") or "", unit="MiB"),
                clean_text(row.value("process_name") or ""),
            )
        )
    return found


def _csv_device(values: dict[str, str]) -> Device:
    fields = Fields(_lookup(values))
    return Device(
        uuid=_uuid(values.get("uuid") or values.get("gpu_uuid")),
        kind=KIND,
        name=fields.text("name", "name", "gpu_name", needed=True),
        memory_bytes=fields.size_bytes("memory", "memory.total", unit="MiB", needed=True),
        ordinal=fields.count("index", "index"),
        pci_bus_id=normal_bus_id(values.get("pci.bus_id", "")),
        split=bool(fields.switch("mig_mode", "mig.mode.current")),
        memory_used_bytes=fields.size_bytes("memory_used", "memory.used", unit="MiB"),
        ecc_enabled=fields.switch("ecc_mode", "ecc.mode.current"),
        temperature_celsius=fields.number("temperature", "temperature.gpu"),
        power_watts=fields.number("power", "power.draw"),
        power_limit_watts=fields.number("power_limit", "power.limit"),
        utilization_ratio=fields.ratio("utilization", "utilization.gpu"),
        pcie_generation=fields.count("pcie_generation", "pcie.link.gen.current"),
        pcie_width=fields.count("pcie_width", "pcie.link.width.current"),
        pcie_generation_max=fields.count("pcie_generation_max", "pcie.link.gen.max"),
        pcie_width_max=fields.count("pcie_width_max", "pcie.link.width.max"),
        notes=fields.notes,
    )


def _lookup(values: dict[str, str]) -> Callable[[str], str | None]:
    return values.get


def _uuid(text: str | None) -> str:
    text = (text or "").strip()
    return text if _UUID.fullmatch(text) else ""


def normal_bus_id(text: str) -> str:
    """A PCI address as Linux writes it: `0000:3b:00.0` for nvidia-smi's `00000000:3B:00.0`."""
    match = re.fullmatch(
        r"(?:([0-9A-Fa-f]{4,8}):)?([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])", text.strip()
    )
    return f"{(match[1] or '0')[-4:]:0>4}:{match[2]}".lower() if match else ""
