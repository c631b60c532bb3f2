"""The agent starts a holder for a device whose memory replicas share, adopts it, and does without one."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_spec, wait_for
from tests.fakes.tiny_adapter import TinyAdapter
from workers.agent.config import AgentConfig
from workers.agent.holders import DeviceHolders, HolderState
from workers.engines.base import EngineOptions, Launch, LaunchContext
from workers.kv.cuda_driver import CudaDriver
from workers.kv.pool import NodePools, pools_folder
from workers.protocol.hardware import AcceleratorInfo
from workers.protocol.observed import ObservedState
from workers.protocol.wish import MpsLimits

GPU = "GPU-00000000-0000-0000-0000-000000000001"
SEES = {"CUDA_VISIBLE_DEVICES": GPU}


def has_cuda_driver() -> bool:
    try:
        CudaDriver()
    except OSError:
        return False
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = pools_folder(f"test-{uuid.uuid4().hex}", tmp_path)
    yield folder
    NodePools(folder).remove_all()


class Clock:
    """Moves with each look, so that nothing has to be waited for twice."""

    def __init__(self) -> None:
        self.now = 1000.0

    def tick(self, seconds: float = 0.01) -> float:
        self.now += seconds
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def holders(folder: Path, tmp_path: Path) -> Iterator[DeviceHolders]:
    holders = DeviceHolders(folder, tmp_path / "logs", memory="host")
    yield holders
    end_all(holders)


def end_all(holders: DeviceHolders) -> None:
    """End what `holders` started; nobody else waits for it."""
    for holder in holders._holders.values():
        if holder.process is not None:
            holder.process.kill()
            holder.process.wait(10)


def wait_answers(holders: DeviceHolders, clock: Clock) -> int:
    wait_for(lambda: holders.find(GPU, SEES, now=clock.tick()) is HolderState.ANSWERS, "the holder answers")
    (pid,) = holders.pids()
    return pid


def test_launch_waits_for_a_holder_that_sees_its_device_alone(holders: DeviceHolders, clock: Clock) -> None:
    assert holders.find(GPU, SEES, now=clock.tick()) is HolderState.STARTING
    pid = wait_answers(holders, clock)
    process = psutil.Process(pid)
    assert process.environ()["CUDA_VISIBLE_DEVICES"] == GPU
    assert os.getsid(pid) == pid, "it is to outlive the agent"
    assert f"--accelerator={GPU}" in process.cmdline()


def test_card_is_told_as_shared_once_its_holder_answers(holders: DeviceHolders, clock: Clock) -> None:
    holders.find(GPU, SEES, now=clock.tick())
    assert holders.sharing() == frozenset()
    wait_answers(holders, clock)
    assert holders.sharing() == {GPU}


def test_card_with_a_replica_that_went_without_is_not_told_as_shared(
    holders: DeviceHolders, clock: Clock
) -> None:
    holders.memory = "no such kind"
    wait_for(lambda: holders.find(GPU, SEES, now=clock.tick()) is HolderState.NONE, "the launch goes without")
    holders.memory = "host"
    clock.tick(3600.0)
    wait_answers(holders, clock)
    assert holders.sharing() == frozenset(), "one replica has weights of its own, which nobody counted"
    holders.tend((), now=clock.tick())
    assert holders.sharing() == {GPU}, "and that one is gone"


def test_next_agent_adopts_it(holders: DeviceHolders, folder: Path, tmp_path: Path, clock: Clock) -> None:
    pid = wait_answers(holders, clock)
    second = DeviceHolders(folder, tmp_path / "logs", memory="host")
    second.tend({GPU}, now=clock.tick())
    assert second.pids() == {pid}, "it is on the device by right before any launch"
    assert second.find(GPU, SEES, now=clock.tick()) is HolderState.ANSWERS
    assert second.pids() == {pid}


def test_dead_holder_is_replaced_while_replicas_are_wanted(holders: DeviceHolders, clock: Clock) -> None:
    first = wait_answers(holders, clock)
    clock.tick(100)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(first) or psutil.Process(first).status() == "zombie", "it ended")

    def replaced() -> bool:
        holders.tend({GPU}, now=clock.tick(6))
        return holders.pids() not in (set(), {first})

    wait_for(replaced, "another one was started")
    assert wait_answers(holders, clock) != first
    holders.tend(set(), now=clock.tick(6))
    assert len(holders.pids()) == 1, "one that was started is looked after until it ends"


def test_holder_that_never_comes_up_is_ended_and_not_tried_at_once(
    holders: DeviceHolders, clock: Clock
) -> None:
    holders.find(GPU, SEES, now=clock.tick())
    (pid,) = holders.pids()
    os.kill(pid, signal.SIGSTOP)
    assert holders.find(GPU, SEES, now=clock.tick()) is HolderState.STARTING
    assert holders.find(GPU, SEES, now=clock.tick(30)) is HolderState.NONE
    assert not psutil.pid_exists(pid)
    assert holders.find(GPU, SEES, now=clock.tick(30)) is HolderState.NONE
    assert holders.find(GPU, SEES, now=clock.tick(60)) is HolderState.STARTING


@pytest.mark.skipif(has_cuda_driver(), reason="this machine has an NVIDIA driver, so nothing is refused")
def test_device_that_cannot_share_is_said_once_with_its_reason(
    folder: Path, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    holders = DeviceHolders(folder, tmp_path / "logs")
    assert holders.find(GPU, SEES, now=clock.tick()) is HolderState.STARTING
    wait_for(lambda: holders.find(GPU, SEES, now=clock.tick()) is HolderState.NONE, "it is given up")
    assert holders.find(GPU, SEES, now=clock.tick(600)) is HolderState.NONE
    assert caplog.text.count("have memory of their own") == 1
    assert "there is no NVIDIA driver here" in caplog.text


def test_switched_off_nothing_is_started(folder: Path, tmp_path: Path, clock: Clock) -> None:
    holders = DeviceHolders(folder, tmp_path / "logs", memory="host", enabled=False)
    assert holders.find(GPU, SEES, now=clock.tick()) is HolderState.NONE
    holders.tend({GPU}, now=clock.tick())
    assert holders.pids() == set()
    assert not folder.exists()


class SharingAdapter(TinyAdapter):
    """The tiny engine, which is told of its holder by its environment."""

    def shares_device_memory(self, options: EngineOptions) -> bool:
        return options.get("alone") != "yes"

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        launch = super().build_launch(options, context)
        return replace(launch, env={**launch.env, "HOLDER": str(context.holder or "")})


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    node = LocalNode(tmp_path / "home", adapter=SharingAdapter(), config=AgentConfig(address="127.0.0.1"))
    node.runner.accelerators = (
        AcceleratorInfo(uuid=GPU, kind="cuda", name="H100", memory_bytes=80 << 30, ordinal=0),
    )
    node.runner.holders.memory = "host"
    yield node
    node.close()
    end_all(node.runner.holders)
    NodePools(node.runner.kv_pools.folder).remove_all()


def holder_of(node: LocalNode, replica_id: str) -> str:
    pid = node.wait_state(replica_id, ObservedState.READY).pid
    assert pid is not None
    return psutil.Process(pid).environ()["HOLDER"]


def test_replica_on_a_device_is_launched_with_its_holder(node: LocalNode) -> None:
    node.wish(make_spec("r1", accelerator_uuids=(GPU,)))
    assert holder_of(node, "r1") == str(node.runner.holders.socket(GPU))
    assert len(node.runner.holders.pids()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"accelerator_uuids": ()},
        {"engine_options": {"alone": "yes"}},
        {"mps": MpsLimits(memory_bytes=1 << 30)},
    ],
    ids=["on the CPU", "that shares nothing", "with an MPS share"],
)
def test_replica_without_use_for_one_starts_none(node: LocalNode, change: dict[str, object]) -> None:
    spec = make_spec("r1", **{"accelerator_uuids": (GPU,), **change})
    if spec.mps is None:
        node.wish(spec)
        assert holder_of(node, "r1") == ""
    else:
        # No MPS daemon is here, so such a replica is refused; its holder is asked for before that.
        node.wish(spec)
        node.wait_state("r1", ObservedState.FAILED)
    assert node.runner.holders.pids() == set()
