"""What the vendors' tools say about accelerators, in one shape. `None`: the tool did not say."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Device:
    """One card, or one slice of a card (then with its `parent_uuid`)."""

    uuid: str
    """Empty where the tool knows none; `pci_bus_id` then says which card it is."""
    kind: str
    name: str | None = None
    memory_bytes: int | None = None
    ordinal: int | None = None
    pci_bus_id: str = ""
    parent_uuid: str = ""
    profile: str = ""
    """What a slice was cut as, such as `3g.40gb`."""
    split: bool = False
    """The card is in MIG mode: only its slices can be used."""
    memory_used_bytes: int | None = None
    ecc_enabled: bool | None = None
    ecc_uncorrected_count: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    utilization_ratio: float | None = None
    pcie_generation: int | None = None
    """As negotiated now: an idle card may have gone down to save power."""
    pcie_width: int | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    numa_node: int | None = None
    notes: tuple[str, ...] = ()
    """One for each field that could not be read, such as `memory: ERR!`."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Memory of a card or slice, as its tool tells it at one moment."""

    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class AcceleratorProcess:
    """A process that holds memory of an accelerator."""

    accelerator_uuid: str
    pid: int
    memory_bytes: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything that one answer of a tool held."""

    devices: tuple[Device, ...] = ()
    processes: tuple[AcceleratorProcess, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What was wrong with the answer as a whole."""
