"""An engine sees the accelerators that it was given, by what never changes, and nothing of another launch."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_spec
from tests.fakes.tiny_adapter import ForkedTinyAdapter, TinyAdapter
from tests.probes import fake_mps, fake_tools
from tests.probes.fake_tools import SAMPLES
from workers.agent.config import AgentConfig
from workers.agent.device_env import DEVICE_VARIABLES, DeviceError, device_environment, with_devices
from workers.agent.memory import find_unseen
from workers.agent.supervisor import launch_digest
from workers.engines.base import EngineAdapter
from workers.probes.accelerators import AcceleratorProbe
from workers.protocol.hardware import AcceleratorInfo
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import MpsLimits

ADAPTERS = pytest.mark.parametrize("adapter", [TinyAdapter(), ForkedTinyAdapter()], ids=["program", "forked"])


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tools"
    fake_mps.install(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def pipes(tmp_path: Path) -> Path:
    return tmp_path / "pipes"


@pytest.fixture
def node(adapter: EngineAdapter, tools: Path, tmp_path: Path, pipes: Path) -> Iterator[LocalNode]:
    """A node whose nvidia-smi has told of whole cards and of slices."""
    fake_tools.install_nvidia(tools, "mig")
    config = AgentConfig(
        address="127.0.0.1", mps_pipe_directory=str(pipes), mps_log_directory=str(tmp_path / "mps-logs")
    )
    node = LocalNode(tmp_path / "home", adapter=adapter, config=config)
    cut = AcceleratorProbe("n", environ={}).survey().accelerators
    fake_tools.install_nvidia(tools, "h100x8")
    node.runner.accelerators = (*cut, *AcceleratorProbe("n", environ={}).survey().accelerators)
    yield node
    node.close()


def devices_of(replica: ReplicaObserved) -> dict[str, str]:
    """What a launched engine's environment says of devices, as the engine itself tells."""
    with urllib.request.urlopen(f"http://{replica.address}/environ", timeout=5) as answer:
        return {name: value for name, value in json.load(answer).items() if name in DEVICE_VARIABLES}


def slices(node: LocalNode) -> list[AcceleratorInfo]:
    return [a for a in node.runner.accelerators if a.parent_uuid]


@ADAPTERS
def test_launched_engine_sees_its_slice_and_nothing_of_the_one_before(
    node: LocalNode, pipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "3")
    card = next(a for a in node.runner.accelerators if not a.parent_uuid)
    fake_mps.start_daemon(pipes)
    limits = MpsLimits(thread_percent=25, memory_bytes=3 << 30)
    node.wish(make_spec("shared", accelerator_uuids=(card.uuid,), mps=limits))
    assert devices_of(node.wait_state("shared", ObservedState.READY)) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": card.uuid,
        "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
        "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "mps-logs"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=3072M",
    }
    part = slices(node)[0]
    node.wish(
        make_spec("shared", accelerator_uuids=(card.uuid,), mps=limits),
        make_spec("alone", accelerator_uuids=(part.uuid,)),
        make_spec("none"),
    )
    assert devices_of(node.wait_state("alone", ObservedState.READY)) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": part.uuid,
    }
    assert devices_of(node.wait_state("none", ObservedState.READY)) == {
        "CUDA_VISIBLE_DEVICES": "",
        "ROCR_VISIBLE_DEVICES": "",
    }


@ADAPTERS
def test_share_of_a_slice_goes_to_the_daemon_of_that_slice(node: LocalNode, pipes: Path) -> None:
    part = slices(node)[0]
    fake_mps.start_daemon(pipes / part.uuid.replace("/", "_"))
    node.wish(make_spec("r", accelerator_uuids=(part.uuid,), mps=MpsLimits(thread_percent=50)))
    seen = devices_of(node.wait_state("r", ObservedState.READY))
    assert seen["CUDA_MPS_PIPE_DIRECTORY"] == str(pipes / part.uuid.replace("/", "_"))
    assert seen["CUDA_VISIBLE_DEVICES"] == part.uuid
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in seen


@ADAPTERS
def test_launch_without_the_mps_daemon_is_refused_with_what_to_do(node: LocalNode, pipes: Path) -> None:
    card = next(a for a in node.runner.accelerators if not a.parent_uuid)
    limits = MpsLimits(thread_percent=25)
    node.wish(make_spec("r", accelerator_uuids=(card.uuid,), mps=limits))
    failed = node.wait_state("r", ObservedState.FAILED)
    assert "nvidia-cuda-mps-control -d" in failed.reason
    assert failed.attempt == 0, "nothing was launched"
    fake_mps.start_daemon(pipes)
    node.wish(make_spec("r", generation=2, accelerator_uuids=(card.uuid,), mps=limits))
    assert devices_of(node.wait_state("r", ObservedState.READY))["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"


@ADAPTERS
@pytest.mark.parametrize("uuid", ["GPU-gone", "the card that was cut"])
def test_replica_of_an_accelerator_that_is_gone_is_not_let_loose_on_others(
    node: LocalNode, uuid: str
) -> None:
    uuid = slices(node)[0].parent_uuid if uuid != "GPU-gone" else uuid
    node.wish(make_spec("r", accelerator_uuids=(uuid,)))
    assert f"accelerator {uuid} is not on this node" in node.wait_state("r", ObservedState.FAILED).reason


def test_launch_waits_while_the_tool_does_not_answer_and_not_for_what_is_gone() -> None:
    spec = make_spec("r", accelerator_uuids=("GPU-1",))
    card = AcceleratorInfo(uuid="GPU-1", kind="cuda", name="H", memory_bytes=1)
    held = find_unseen(spec, (), complete=False)
    assert held is not None
    assert "waiting for accelerator GPU-1" in held.text
    assert find_unseen(spec, (), complete=True) is None
    assert find_unseen(spec, (card,), complete=False) is None


def test_amd_cards_are_shown_by_unique_id_and_counted_anew_for_hip(tools: Path) -> None:
    fake_tools.install(
        tools, "amd-smi", {"static --json": SAMPLES / "mi300x.amd-static.json", "process --json": "[]",
                           "metric --json": "[]"},
    )  # fmt: skip
    here = AcceleratorProbe("n", environ={}).survey().accelerators
    named = [a for a in here if a.uuid.startswith("GPU-")]
    assert device_environment([named[0].uuid], here) == {
        "ROCR_VISIBLE_DEVICES": named[0].uuid,
        "HIP_VISIBLE_DEVICES": "0",
    }
    unnamed = [a for a in here if not a.uuid.startswith("GPU-")]
    for card in unnamed:
        with pytest.raises(DeviceError, match="no unique id"):
            device_environment([card.uuid], here)
        assert device_environment([card.uuid], (card,))["ROCR_VISIBLE_DEVICES"] == "0"


def test_intel_cards_are_shown_by_their_place_in_the_order_of_pci_addresses() -> None:
    here = tuple(
        AcceleratorInfo(
            uuid=f"XPU-n-{bus}", kind="xpu", name="Max", memory_bytes=1, ordinal=n, pci_bus_id=bus
        )
        for n, bus in enumerate(["0000:9a:00.0", "0000:18:00.0", "0000:3a:00.0"])
    )
    seen = device_environment([here[0].uuid, here[1].uuid], here)
    assert seen["ZE_AFFINITY_MASK"] == "2,0"
    assert seen["ZE_ENABLE_PCI_ID_DEVICE_ORDER"] == "1"
    assert seen["ZE_FLAT_DEVICE_HIERARCHY"] == "COMPOSITE"


def test_two_slices_or_two_kinds_for_one_process_are_refused() -> None:
    def card(uuid: str, kind: str = "cuda", parent: str = "") -> AcceleratorInfo:
        return AcceleratorInfo(uuid=uuid, kind=kind, name="", memory_bytes=1, parent_uuid=parent)

    here = (card("MIG-1", parent="GPU-1"), card("MIG-2", parent="GPU-1"), card("GPU-2"), card("X", "xpu"))
    with pytest.raises(DeviceError, match="one MIG slice only"):
        device_environment(["MIG-1", "MIG-2"], here)
    with pytest.raises(DeviceError, match="different kinds"):
        device_environment(["GPU-2", "X"], here)


def test_what_an_adapter_says_of_devices_is_replaced() -> None:
    wanted = {"A": "1", "CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G"}
    assert with_devices(wanted, {"CUDA_VISIBLE_DEVICES": "GPU-1"}) == {
        "A": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-1",
    }


def test_another_share_means_a_relaunch_and_none_means_what_it_meant_before() -> None:
    plain, shared = make_spec("r"), make_spec("r", mps=MpsLimits(thread_percent=10))
    other = make_spec("r", mps=MpsLimits(thread_percent=20))
    assert len({launch_digest(plain), launch_digest(shared), launch_digest(other)}) == 3
    # As agents before this field computed it: what runs is not started anew by an upgrade.
    assert launch_digest(plain) == PLAIN_DIGEST


PLAIN_DIGEST = "09f387d2215f9d89a8e9e43fa0a59c10"
