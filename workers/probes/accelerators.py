"""Accelerators of this node, by the vendors' own tools: no CUDA context, no torch in the agent."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from workers.probes import amd, intel, nvidia
from workers.probes.devices import AcceleratorProcess, CardMemory, Device, Inventory
from workers.probes.limits import Limits, read_limits, usable_cpu_count, usable_memory_bytes
from workers.probes.mps import MpsProbe, MpsState
from workers.probes.selection import SelectionError, select_visible
from workers.probes.tools import Answer, VendorTool
from workers.probes.topology import Topology, parse_topology
from workers.protocol import hardware
from workers.protocol.hardware import AcceleratorInfo, TopologyEndpoint, TopologyLink

NO_MPS = MpsState(note="this node has no CUDA card")
_CPU_MEMORY_RATIO = 0.8
_MOST_NOTES = 32
_LONGEST_UUID = 80
"""As the control plane keeps it."""
_NO_CARDS = "No devices were found"
_AMD_STATIC = ("static", "--json")
_ROCM_MEMORY = ("--showuniqueid", "--showmeminfo", "vram", "--showproductname", "--showbus", "--json")
_XPU_LIST = ("discovery", "-j")


@dataclass(frozen=True, slots=True)
class Survey:
    """What a node offers, and all that is known of its cards."""

    accelerators: tuple[AcceleratorInfo, ...]
    """What replicas may be placed on; the CPU where there is nothing else."""
    split_cards: tuple[AcceleratorInfo, ...] = ()
    """Cards in MIG mode: they are used by their slices only."""
    devices: tuple[Device, ...] = ()
    """Every card and slice that was seen, offered or not."""
    processes: tuple[AcceleratorProcess, ...] = ()
    topology: hardware.Topology | None = None
    notes: tuple[str, ...] = ()
    complete: bool = True
    """Every tool that is installed has answered. If not, cards may be there that were not seen."""
    mps: MpsState = NO_MPS
    """Whether replicas can have MPS shares of CUDA cards."""


@dataclass(frozen=True, slots=True)
class _Found:
    inventory: Inventory = field(default_factory=Inventory)
    topology: Topology | None = None
    complete: bool = True


class AcceleratorProbe:
    """Asks whichever tools are installed. Keeps its tools apart from others', so one for each thread."""

    def __init__(
        self,
        node_id: str,
        *,
        cpu_memory_bytes: int = 0,
        environ: Mapping[str, str] | None = None,
        mps: MpsProbe | None = None,
    ) -> None:
        self._node_id = node_id
        self._mps = mps or MpsProbe()
        self._cpu_memory_bytes = cpu_memory_bytes
        self._environ = os.environ if environ is None else environ
        self._nvidia = VendorTool("nvidia-smi")
        self._amd = VendorTool("amd-smi")
        self._rocm = VendorTool("rocm-smi")
        self._xpu = VendorTool("xpu-smi")
        self._static: dict[tuple[str, ...], str] = {}
        """Pages that only a survey asks for anew: the tools that make them take a second each."""

    def survey(self) -> Survey:
        """Look at everything. Takes seconds on a host with many cards; never raises for a bad tool."""
        self._static.clear()
        parts = (self._survey_nvidia(), self._survey_amd(), self._survey_intel())
        inventory = name_for_fleet(
            Inventory(
                tuple(device for part in parts for device in part.inventory.devices),
                tuple(process for part in parts for process in part.inventory.processes),
                tuple(note for part in parts for note in part.inventory.notes),
            ),
            self._node_id,
        )
        cpu = cpu_accelerator(self._node_id, self._cpu_memory_bytes)
        survey = make_survey(inventory, parts[0].topology, self._environ, cpu)
        return replace(survey, complete=all(part.complete for part in parts), mps=self._survey_mps(survey))

    def _survey_mps(self, survey: Survey) -> MpsState:
        """Only CUDA cards have it; elsewhere nothing is asked."""
        cards = [accelerator for accelerator in survey.accelerators if accelerator.kind == nvidia.KIND]
        if not cards:
            return NO_MPS
        return self._mps.look_at_any(tuple(card.uuid for card in cards if card.parent_uuid))

    def processes(self) -> tuple[AcceleratorProcess, ...]:
        """Who holds memory of accelerators now; empty where no tool tells."""
        found: list[AcceleratorProcess] = []
        if self._nvidia.present:
            question = f"--query-compute-apps={','.join(nvidia.PROCESS_COLUMNS)}"
            found += nvidia.parse_process_csv(
                self._nvidia.ask(question, "--format=csv,noheader,nounits").text
            )
        if self._amd.present:
            page = self._amd.ask("process", "--json").text
            found += self._named(amd.parse_amd_smi(self._once(self._amd, _AMD_STATIC), page))
        if self._xpu.present:
            page = self._xpu.ask("ps", "-j").text
            found += self._named(intel.parse_xpu_smi(self._once(self._xpu, _XPU_LIST), processes=page))
        return tuple(found)

    def memory(self) -> dict[str, CardMemory]:
        """Memory of each card and slice as it is now, by UUID; without those whose tool does not say."""
        found: list[Device] = []
        if self._nvidia.present:
            found += self._nvidia_memory()
        if self._amd.present:
            metric = self._amd.ask("metric", "--json").text
            found += amd.parse_amd_smi(self._once(self._amd, _AMD_STATIC), metric=metric).devices
        elif self._rocm.present:
            found += amd.parse_rocm_smi(self._rocm.ask(*_ROCM_MEMORY).text).devices
        if self._xpu.present:
            found += self._intel_memory()
        named = name_for_fleet(Inventory(tuple(found)), self._node_id).devices
        return {
            device.uuid: CardMemory(device.memory_bytes, device.memory_used_bytes)
            for device in named
            if device.memory_bytes and device.memory_used_bytes is not None
        }

    def _nvidia_memory(self) -> tuple[Device, ...]:
        """Slices stand on the long page alone, and by UUID in the listing alone."""
        listed = nvidia.parse_list(self._nvidia.ask("-L").text)
        if any(card.slices for card in listed):
            return nvidia.parse_query(self._nvidia.ask("-q", "-x").text, listed).devices
        page = self._nvidia.ask(f"--query-gpu={','.join(nvidia.GPU_COLUMNS)}", "--format=csv").text
        return nvidia.parse_gpu_csv(page).devices

    def _intel_memory(self) -> tuple[Device, ...]:
        listing = self._once(self._xpu, _XPU_LIST)
        numbers = [str(number) for number in intel.device_ids(listing)]
        details = [self._once(self._xpu, ("discovery", "-d", number, "-j")) for number in numbers]
        stats = [self._xpu.ask("stats", "-d", number, "-j").text for number in numbers]
        return intel.parse_xpu_smi(listing, details, stats).devices

    def _named(self, inventory: Inventory) -> tuple[AcceleratorProcess, ...]:
        return name_for_fleet(inventory, self._node_id).processes

    def _once(self, tool: VendorTool, arguments: tuple[str, ...]) -> str:
        key = (tool.name, *arguments)
        if key not in self._static:
            answer = tool.ask(*arguments)
            if not answer.good:
                return ""
            self._static[key] = answer.text
        return self._static[key]

    def _survey_nvidia(self) -> _Found:
        tool = self._nvidia
        if not tool.present:
            return _Found()
        listing = tool.ask("-L")
        if listing.problem and not listing.text:
            return _Found(Inventory(notes=(listing.problem,)), complete=False)
        listed = nvidia.parse_list(listing.text)
        inventory = nvidia.parse_query(tool.ask("-q", "-x").text, listed)
        if not inventory.devices and listed:
            inventory = self._nvidia_by_columns(inventory)
        if not inventory.devices:
            complaints = dict.fromkeys((*nvidia.parse_complaints(listing.text), *inventory.notes))
            return _Found(Inventory(notes=tuple(complaints)), complete=_NO_CARDS in listing.text)
        uuids = {
            device.ordinal: device.uuid
            for device in inventory.devices
            if not device.parent_uuid and device.ordinal is not None
        }
        return _Found(inventory, parse_topology(tool.ask("topo", "-m").text, uuids))

    def _nvidia_by_columns(self, before: Inventory) -> Inventory:
        """A second way to the same: some releases end `-q -x` over one ill card."""
        page = self._nvidia.ask(f"--query-gpu={','.join(nvidia.GPU_COLUMNS)}", "--format=csv").text
        found = nvidia.parse_gpu_csv(page)
        return replace(found, notes=(*before.notes, *found.notes))

    def _survey_amd(self) -> _Found:
        if self._amd.present:
            static = self._amd.ask(*_AMD_STATIC)
            if static.good:
                self._static[self._amd.name, *_AMD_STATIC] = static.text
                metric, processes = (self._amd.ask(page, "--json").text for page in ("metric", "process"))
                inventory = amd.parse_amd_smi(static.text, processes, metric)
                if inventory.devices:
                    return _Found(inventory)
        if not self._rocm.present:
            return _Found(complete=not self._amd.present)
        answer = self._rocm.ask(*_ROCM_MEMORY)
        return _from_answer(answer, amd.parse_rocm_smi(answer.text))

    def _survey_intel(self) -> _Found:
        tool = self._xpu
        if not tool.present:
            return _Found()
        answer = tool.ask(*_XPU_LIST)
        if answer.good:
            self._static[tool.name, *_XPU_LIST] = answer.text
        numbers = [str(number) for number in intel.device_ids(answer.text)]
        details = [tool.ask("discovery", "-d", number, "-j").text for number in numbers]
        stats = [tool.ask("stats", "-d", number, "-j").text for number in numbers]
        return _from_answer(answer, intel.parse_xpu_smi(answer.text, details, stats))


def discover(node_id: str, *, cpu_memory_bytes: int = 0) -> tuple[AcceleratorInfo, ...]:
    """Find this node's accelerators; one without any offers its CPU as a single one.

    `cpu_memory_bytes` bounds what a CPU offers; 0 means 80% of the memory that may be used.
    """
    return AcceleratorProbe(node_id, cpu_memory_bytes=cpu_memory_bytes).survey().accelerators


def settle(before: Survey, now: Survey) -> Survey:
    """What to believe after another look: a tool that did not answer takes no accelerator away."""
    return now if now.complete else replace(before, notes=now.notes, complete=False)


def make_survey(
    inventory: Inventory, topology: Topology | None, environ: Mapping[str, str], cpu: AcceleratorInfo
) -> Survey:
    """Decide what is offered of what was found."""
    notes = [f"{device.uuid} {note}" for device in inventory.devices for note in device.notes]
    notes = [*inventory.notes, *notes]
    devices = _with_numa(inventory.devices, topology)
    cards = [device for device in devices if device.kind == nvidia.KIND]
    others = [device for device in devices if device.kind != nvidia.KIND]
    order = environ.get("CUDA_DEVICE_ORDER", "")
    try:
        visible = select_visible(environ.get("CUDA_VISIBLE_DEVICES"), cards, device_order=order)
    except SelectionError as error:
        notes.insert(0, f"CUDA_VISIBLE_DEVICES: {error}; no CUDA card is offered")
        visible = ()
    offered = tuple(accelerator_info(device) for device in (*visible, *others))
    return Survey(
        offered or (cpu,),
        tuple(accelerator_info(card) for card in cards if card.split),
        devices,
        inventory.processes,
        _topology_message(topology),
        tuple(notes + list(topology.notes if topology else ()))[:_MOST_NOTES],
    )


def accelerator_info(device: Device) -> AcceleratorInfo:
    """A device as the protocol says it. A size that was not told is 0 there, and marked."""
    unreadable = {"name": device.name, "memory_bytes": device.memory_bytes}
    return AcceleratorInfo(
        uuid=device.uuid,
        kind=device.kind,
        name=device.name or "unknown",
        memory_bytes=device.memory_bytes or 0,
        ordinal=device.ordinal or 0,
        parent_uuid=device.parent_uuid,
        profile=device.profile,
        pci_bus_id=device.pci_bus_id,
        numa_node=device.numa_node,
        pcie_generation=device.pcie_generation_max,
        pcie_width=device.pcie_width_max,
        unreadable=tuple(name for name, value in unreadable.items() if value is None),
        pcie_generation_now=device.pcie_generation,
        pcie_width_now=device.pcie_width,
    )


def name_for_fleet(inventory: Inventory, node_id: str) -> Inventory:
    """Give each device a name that no other host has.

    Intel's UUIDs are made from model and slot, so equal hosts have equal ones; some AMD cards have none.
    """
    names: dict[str, str] = {}
    devices = []
    notes = list(inventory.notes)
    for device in inventory.devices:
        uuid = _fleet_uuid(device, node_id)
        if not uuid:
            notes.append(f"left out {device.kind} card {device.ordinal}: neither unique id nor PCI address")
            continue
        if device.uuid:
            names[device.uuid] = uuid
        devices.append(replace(device, uuid=uuid))
    processes = tuple(
        replace(process, accelerator_uuid=names[process.accelerator_uuid])
        for process in inventory.processes
        if process.accelerator_uuid in names
    )
    return Inventory(tuple(devices), processes, tuple(notes))


def _fleet_uuid(device: Device, node_id: str) -> str:
    if device.uuid and device.kind != intel.KIND:
        return device.uuid
    known = device.uuid or device.pci_bus_id
    name = f"{device.kind.upper()}-{node_id}-{known}"
    if len(name) > _LONGEST_UUID:
        known, name = device.pci_bus_id, f"{device.kind.upper()}-{node_id}-{device.pci_bus_id}"
    return name if known else ""


def cpu_accelerator(node_id: str, memory_bytes: int, limits: Limits | None = None) -> AcceleratorInfo:
    """The host's CPU as an accelerator; its id is the node's, so it is stable and unique."""
    limits = read_limits() if limits is None else limits
    most = int(usable_memory_bytes(limits) * _CPU_MEMORY_RATIO)
    return AcceleratorInfo(
        uuid=f"CPU-{node_id}",
        kind="cpu",
        name=f"CPU, {usable_cpu_count(limits)} threads",
        memory_bytes=min(most, memory_bytes) if memory_bytes else most,
    )


def _from_answer(answer: Answer, inventory: Inventory) -> _Found:
    if answer.problem:
        inventory = replace(inventory, notes=(answer.problem, *inventory.notes))
    return _Found(inventory, complete=bool(inventory.devices))


def _with_numa(devices: Sequence[Device], topology: Topology | None) -> tuple[Device, ...]:
    nodes = {end.name: end.numa_node for end in (topology.endpoints if topology else ())}
    return tuple(
        device
        if device.numa_node is not None
        else replace(device, numa_node=nodes.get(device.parent_uuid or device.uuid))
        for device in devices
    )


def _topology_message(topology: Topology | None) -> hardware.Topology | None:
    if topology is None or not topology.endpoints:
        return None
    return hardware.Topology(
        endpoints=tuple(
            TopologyEndpoint(
                name=end.name, accelerator=end.accelerator, numa_node=end.numa_node, cpus=end.cpus
            )
            for end in topology.endpoints
        ),
        links=tuple(
            TopologyLink(a=link.a, b=link.b, kind=link.kind, rank=link.rank) for link in topology.links
        ),
    )
