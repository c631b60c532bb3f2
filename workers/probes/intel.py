"""JSON of xpu-smi. Pure, and none raises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from workers.probes.devices import AcceleratorProcess, Device, Inventory
from workers.probes.nvidia import normal_bus_id
from workers.probes.trees import as_text, items, load, look_up
from workers.probes.values import Fields, clean_text, parse_pid, parse_size_bytes

KIND = "xpu"
_MEMORY_USED = "XPUM_STATS_MEMORY_USED"
_TEMPERATURE = "XPUM_STATS_GPU_CORE_TEMPERATURE"
_POWER = "XPUM_STATS_POWER"
_UTILIZATION = "XPUM_STATS_GPU_UTILIZATION"


def device_ids(discovery: str) -> tuple[int, ...]:
    """Which devices `xpu-smi discovery -j` lists: each has to be asked for by its number."""
    return tuple(number for number in map(_number, _device_rows(discovery)) if number is not None)


def parse_xpu_smi(
    discovery: str, details: Iterable[str] = (), stats: Iterable[str] = (), processes: str = ""
) -> Inventory:
    """Read `discovery -j`, then `discovery -d N -j` and `stats -d N -j` of each, and `ps -j`.

    The list alone has no memory sizes. A detail that is missing leaves `None` and a note.
    """
    more = {_number(row): row for page in details for row in _device_rows(page)}
    levels = {_number(row): row for page in stats for row in _device_rows(page)}
    devices = tuple(
        _device(position, {**row, **more.get(_number(row), {})}, levels.get(_number(row), {}))
        for position, row in enumerate(_device_rows(discovery))
    )
    uuids = {device.ordinal: device.uuid for device in devices}
    return Inventory(devices, _processes(processes, uuids), () if devices else (_complaint(discovery),))


def _device(position: int, row: Mapping[str, object], levels: Mapping[str, object]) -> Device:
    fields = Fields(lambda path: look_up(row, path))
    number = _number(row)
    device = Device(
        uuid=fields.text("uuid", "uuid", "soc_uuid") or "",
        kind=KIND,
        name=fields.text("name", "device_name", needed=True),
        # Old releases give `memory_physical_size` in MiB without saying so.
        memory_bytes=fields.size_bytes("memory", "memory_physical_size_byte", needed=False)
        or fields.size_bytes("memory", "memory_physical_size", unit="MiB", needed=True),
        ordinal=position if number is None else number,
        pci_bus_id=normal_bus_id(fields.text("pci_bus_id", "pci_bdf_address") or ""),
        pcie_generation_max=fields.count("pcie_generation_max", "pcie_generation"),
        pcie_width_max=fields.count("pcie_width_max", "pcie_max_link_width"),
    )
    return replace(_with_stats(device, levels, fields), notes=fields.notes)


def _with_stats(device: Device, levels: Mapping[str, object], fields: Fields) -> Device:
    values = {as_text(row.get("metrics_type")): row.get("value") for row in items(levels.get("device_level"))}
    read = Fields(lambda name: as_text(values.get(name)))
    filled = replace(
        device,
        memory_used_bytes=read.size_bytes("memory_used", _MEMORY_USED, unit="MiB"),
        temperature_celsius=read.number("temperature", _TEMPERATURE),
        power_watts=read.number("power", _POWER),
        utilization_ratio=read.ratio("utilization", _UTILIZATION),
    )
    for note in read.notes:
        label, _, value = note.partition(": ")
        fields.note(label, value)
    return filled


def _processes(page: str, uuids: Mapping[int | None, str]) -> tuple[AcceleratorProcess, ...]:
    tree = load(page)
    rows = items(tree.get("device_util_by_proc_list")) if isinstance(tree, dict) else []
    found = []
    for row in rows:
        uuid, pid = uuids.get(_number(row)), parse_pid(as_text(row.get("process_id")) or "")
        if uuid and pid is not None:
            size = parse_size_bytes(as_text(row.get("mem_size")) or "", unit="KiB")
            found.append(
                AcceleratorProcess(uuid, pid, size, clean_text(as_text(row.get("process_name")) or ""))
            )
    return tuple(found)


def _device_rows(page: str) -> list[Mapping[str, object]]:
    tree = load(page)
    if not isinstance(tree, dict):
        return items(tree)
    return items(tree.get("device_list")) or ([tree] if "device_id" in tree else [])


def _number(row: Mapping[str, object]) -> int | None:
    text = as_text(row.get("device_id")) or ""
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 5 else None  # noqa: PLR2004 - a sane index


def _complaint(page: str) -> str:
    tree = load(page)
    said = look_up(tree, "error") if isinstance(tree, dict) else None
    return f"xpu-smi: {clean_text(said) if said else 'no device on the page'}"
