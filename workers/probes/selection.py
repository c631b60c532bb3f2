"""Which accelerators `CUDA_VISIBLE_DEVICES` leaves, as CUDA itself reads it, but loud where CUDA is silent.

CUDA drops everything after an entry that it does not understand. Here such an entry is refused: an
agent that quietly offers fewer cards, or another card than was meant, is found out much too late.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from workers.probes.devices import Device

_NOTHING = frozenset(("", "-1", "none", "void", "nodevfiles"))
"""`NoDevFiles` is what Slurm sets for a job without GPUs."""
_BUS_ORDER = "PCI_BUS_ID"


class SelectionError(ValueError):
    """An entry that names no card, or more than one; the text says which and what would be right."""


def select_visible(
    text: str | None, devices: Sequence[Device], *, device_order: str = ""
) -> tuple[Device, ...]:
    """The devices that are visible, in the order of the list; `text` is `None` where it is not set.

    A card in MIG mode counts only by its slices. `device_order` is `CUDA_DEVICE_ORDER`. Raises
    `SelectionError`.
    """
    usable = tuple(device for device in devices if not device.split)
    if text is None:
        return usable
    chosen: list[Device] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.lower() in _NOTHING:
            break  # CUDA stops here; for an empty list that leaves nothing
        device = _find(entry, devices, device_order)
        if device in chosen:
            raise SelectionError(f"{entry!r} names {device.uuid} a second time")
        chosen.append(device)
    return tuple(chosen)


def _find(entry: str, devices: Sequence[Device], device_order: str) -> Device:
    if re.fullmatch("[0-9]{1,4}", entry):
        return _by_index(int(entry), devices, device_order)
    if not entry.startswith(("GPU-", "MIG-")):
        raise SelectionError(f"{entry!r} is neither an index nor GPU-… nor MIG-…")
    exact = [device for device in devices if device.uuid == entry]
    found = exact or [device for device in devices if device.uuid.startswith(entry)]
    if len(found) > 1:
        raise SelectionError(f"{entry!r} is ambiguous: {', '.join(d.uuid for d in found)}; write more of it")
    if not found:
        raise SelectionError(f"{entry!r} names no accelerator of this host")
    return _whole(entry, found[0])


def _by_index(index: int, devices: Sequence[Device], device_order: str) -> Device:
    cards = sorted(
        (device for device in devices if not device.parent_uuid),
        key=lambda card: (card.pci_bus_id, card.ordinal if card.ordinal is not None else 0),
    )
    if index >= len(cards):
        raise SelectionError(f"index {index} is past the {len(cards)} cards of this host")
    if device_order != _BUS_ORDER and len({card.name for card in cards}) > 1:
        raise SelectionError(
            f"index {index} is ambiguous on a host with different cards: CUDA counts the fastest first, "
            f"nvidia-smi by PCI address; name cards by UUID, or set CUDA_DEVICE_ORDER={_BUS_ORDER}"
        )
    return _whole(str(index), cards[index])


def _whole(entry: str, device: Device) -> Device:
    if device.split:
        raise SelectionError(f"{entry!r} is {device.uuid} in MIG mode: name its slices by MIG-…")
    return device
