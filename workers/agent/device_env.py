"""Which devices a launched engine sees, and within which limits: its environment. Pure.

The agent decides this for every engine alike, and it is the whole story: nothing of the agent's own
environment reaches an engine, and what an adapter says of devices is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.protocol.hardware import AcceleratorInfo
from workers.protocol.wish import MpsLimits

_MIB = 1 << 20
_CPU = "cpu"
_HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
"""For a replica on the CPU: it must not help itself to a card. Set and empty is none, unset would be all."""
DEVICE_VARIABLES = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_LOG_DIRECTORY",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "ZE_AFFINITY_MASK",
        "ZE_ENABLE_PCI_ID_DEVICE_ORDER",
        "ZE_FLAT_DEVICE_HIERARCHY",
        "ONEAPI_DEVICE_SELECTOR",
    }
)
"""What the agent alone decides."""


class DeviceError(ValueError):
    """The accelerators that a replica was given cannot be shown to it; the text says which and why."""


@dataclass(frozen=True, slots=True)
class MpsFolders:
    """Where an MPS control daemon is reached, and where it logs."""

    pipes: Path
    logs: Path


def device_environment(uuids: Sequence[str], here: Sequence[AcceleratorInfo]) -> dict[str, str]:
    """Variables that show an engine exactly these accelerators, by what never changes. Raises `DeviceError`.

    `here`: all accelerators of this node, as discovered.
    """
    known = {accelerator.uuid: accelerator for accelerator in here}
    missing = [uuid for uuid in uuids if uuid not in known]
    if missing:
        raise DeviceError(f"accelerator {missing[0]} is not on this node (any more), or was cut into slices")
    chosen = [known[uuid] for uuid in uuids]
    kinds = {accelerator.kind for accelerator in chosen} or {_CPU}
    if len(kinds) > 1:
        raise DeviceError(
            f"accelerators of different kinds cannot serve one replica: {', '.join(sorted(kinds))}"
        )
    (kind,) = kinds
    match kind:
        case "cuda":
            return _cuda(chosen)
        case "rocm":
            return _rocm(chosen, here)
        case "xpu":
            return _xpu(chosen, here)
        case _:
            return dict(_HIDDEN)


def mps_environment(limits: MpsLimits, count: int, folders: MpsFolders) -> dict[str, str]:
    """Variables that make an engine a client of MPS within its limits, on `count` accelerators."""
    found = {"CUDA_MPS_PIPE_DIRECTORY": str(folders.pipes), "CUDA_MPS_LOG_DIRECTORY": str(folders.logs)}
    if limits.thread_percent:
        found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(limits.thread_percent)
    if limits.memory_bytes:
        # Devices are counted among those that the client sees.
        each = f"{max(1, limits.memory_bytes // _MIB)}M"
        found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{place}={each}" for place in range(count))
    return found


def with_devices(wanted: Mapping[str, str], devices: Mapping[str, str]) -> dict[str, str]:
    """An engine's environment with these device variables and no others."""
    return {name: value for name, value in wanted.items() if name not in DEVICE_VARIABLES} | {**devices}


def _cuda(chosen: Sequence[AcceleratorInfo]) -> dict[str, str]:
    """By UUID of card or MIG instance: ordinals change with the visible set and from boot to boot."""
    slices = [accelerator.uuid for accelerator in chosen if accelerator.parent_uuid]
    if slices and len(chosen) > 1:
        raise DeviceError(f"a process can use one MIG slice only, and this replica was given {len(chosen)}")
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(accelerator.uuid for accelerator in chosen),
    }


def _rocm(chosen: Sequence[AcceleratorInfo], here: Sequence[AcceleratorInfo]) -> dict[str, str]:
    """By unique id in the runtime below, which numbers what it shows from 0 for HIP above it.

    `CUDA_VISIBLE_DEVICES` stays unset: HIP would read it as well.
    """
    unnamed = [accelerator.uuid for accelerator in chosen if not accelerator.uuid.startswith("GPU-")]
    names = [accelerator.uuid for accelerator in chosen]
    if unnamed:
        if sum(accelerator.kind == "rocm" for accelerator in here) > 1:
            raise DeviceError(
                f"{unnamed[0]} has no unique id, and ROCm selects cards by nothing else for sure"
            )
        names = ["0"]
    return {
        "ROCR_VISIBLE_DEVICES": ",".join(names),
        "HIP_VISIBLE_DEVICES": ",".join(str(place) for place in range(len(names))),
    }


def _xpu(chosen: Sequence[AcceleratorInfo], here: Sequence[AcceleratorInfo]) -> dict[str, str]:
    """Level Zero knows places only: so it is told to count whole cards by PCI address, as is done here."""
    cards = sorted(
        (accelerator for accelerator in here if accelerator.kind == "xpu"),
        key=lambda card: (card.pci_bus_id, card.ordinal),
    )
    places = {card.uuid: place for place, card in enumerate(cards)}
    return {
        "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1",
        "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
        "ZE_AFFINITY_MASK": ",".join(str(places[card.uuid]) for card in chosen),
        "CUDA_VISIBLE_DEVICES": "",
    }
