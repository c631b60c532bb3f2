"""JSON of amd-smi and rocm-smi. Pure, and none raises. Layouts differ by release; all are read alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from workers.probes.devices import AcceleratorProcess, Device, Inventory
from workers.probes.nvidia import normal_bus_id
from workers.probes.trees import as_text, items, load, look_up
from workers.probes.values import Fields, clean_text, parse_pid, parse_size_bytes

KIND = "rocm"


def parse_rocm_smi(page: str) -> Inventory:
    """Read `rocm-smi --showuniqueid --showmeminfo vram --showproductname --showbus --json`."""
    tree = load(page)
    if not isinstance(tree, dict):
        return Inventory(notes=("rocm-smi: no JSON object on the page",))
    devices = []
    for key, values in tree.items():
        match = re.fullmatch(r"card([0-9]{1,4})", key)
        if match is not None and isinstance(values, dict):
            devices.append(_rocm_card(int(match[1]), values))
    return Inventory(tuple(devices), notes=() if devices else ("rocm-smi: no card on the page",))


def parse_amd_smi(static: str, processes: str = "", metric: str = "") -> Inventory:
    """Read `amd-smi static --json`, and beside it `process --json` and `metric --json`."""
    cards = _gpu_rows(static)
    metrics = {as_text(row.get("gpu")): row for row in _gpu_rows(metric)}
    devices = tuple(
        _amd_card(position, row, metrics.get(as_text(row.get("gpu")), {}))
        for position, row in enumerate(cards)
    )
    uuids = {as_text(row.get("gpu")): device.uuid for row, device in zip(cards, devices, strict=True)}
    found = tuple(
        process
        for row in _gpu_rows(processes)
        for process in _amd_processes(uuids.get(as_text(row.get("gpu")), ""), row)
    )
    return Inventory(devices, found, () if devices else ("amd-smi: no card on the page",))


def unique_uuid(text: str | None) -> str:
    """The name by which ROCm itself selects a card, from its unique id; empty for none or all zeros."""
    match = re.fullmatch(r"(?:0x)?([0-9A-Fa-f]{1,16})", (text or "").strip())
    number = int(match[1], 16) if match else 0
    return f"GPU-{number:016x}" if number else ""


def _rocm_card(ordinal: int, values: Mapping[str, object]) -> Device:
    lower = {key.lower(): as_text(value) for key, value in values.items()}
    fields = Fields(lower.get)
    return Device(
        uuid=unique_uuid(fields.text("unique_id", "unique id", needed=True)),
        kind=KIND,
        name=fields.text("name", "card series", "card model", "device name", needed=True),
        memory_bytes=fields.size_bytes("memory", "vram total memory (b)", needed=True),
        ordinal=ordinal,
        pci_bus_id=normal_bus_id(lower.get("pci bus") or ""),
        memory_used_bytes=fields.size_bytes("memory_used", "vram total used memory (b)"),
        temperature_celsius=fields.number(
            "temperature", "temperature (sensor junction) (c)", "temperature (sensor edge) (c)"
        ),
        power_watts=fields.number(
            "power", "current socket graphics package power (w)", "average graphics package power (w)"
        ),
        utilization_ratio=fields.ratio("utilization", "gpu use (%)"),
        notes=fields.notes,
    )


def _amd_card(position: int, row: Mapping[str, object], metric: Mapping[str, object]) -> Device:
    fields = Fields(_either(row, metric))
    ordinal = fields.count("gpu", "gpu")
    return Device(
        uuid=unique_uuid(fields.text("asic_serial", "asic/asic_serial", needed=True)),
        kind=KIND,
        name=fields.text("name", "asic/market_name", "board/product_name", needed=True),
        memory_bytes=fields.size_bytes("memory", "vram/size", "vram/vram_size_mb", unit="MB", needed=True),
        ordinal=position if ordinal is None else ordinal,
        pci_bus_id=normal_bus_id(fields.text("bdf", "bus/bdf") or ""),
        memory_used_bytes=fields.size_bytes("memory_used", "mem_usage/used_vram", unit="MB"),
        temperature_celsius=fields.number("temperature", "temperature/hotspot", "temperature/edge"),
        power_watts=fields.number("power", "power/socket_power"),
        utilization_ratio=fields.ratio("utilization", "usage/gfx_activity"),
        pcie_width_max=fields.count("pcie_width_max", "bus/max_pcie_width"),
        numa_node=fields.count("numa", "numa/node"),
        notes=fields.notes,
    )


def _either(row: Mapping[str, object], metric: Mapping[str, object]) -> Callable[[str], str | None]:
    def find(path: str) -> str | None:
        found = look_up(row, path)
        return look_up(metric, path) if found is None else found

    return find


def _amd_processes(uuid: str, row: Mapping[str, object]) -> list[AcceleratorProcess]:
    found = []
    for entry in items(row.get("process_list")):
        info = entry.get("process_info", entry)
        if not uuid or not isinstance(info, dict):
            continue  # without any process the tool writes a sentence here
        pid = parse_pid(as_text(info.get("pid")) or "")
        size = look_up(info, "memory_usage/vram_mem") or look_up(info, "mem_usage") or ""
        if pid is not None:
            name = clean_text(as_text(info.get("name")) or "")
            found.append(AcceleratorProcess(uuid, pid, parse_size_bytes(size), name))
    return found


def _gpu_rows(page: str) -> list[Mapping[str, object]]:
    tree = load(page)
    return items(tree.get("gpu_data") if isinstance(tree, dict) else tree)
