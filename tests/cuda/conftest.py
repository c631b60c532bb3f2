"""What needs a CUDA device: `make cuda`. Without one each test is skipped with the reason.

`EXAOPS_CUDA_DRY_RUN=1 make cuda` walks through the same scripts on the host's memory and the CPU. That shows
that the scripts are sound, and nothing about a device.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import wait_until
from workers.engines.demo_model import make_demo_model
from workers.kv.holder_link import HolderLink, is_holder_there, socket_of
from workers.kv.holder_wire import AskStatus, Status
from workers.kv.pool import NodePools, pools_folder

ROOT = Path(__file__).parents[2]
DRY_RUN = os.environ.get("EXAOPS_CUDA_DRY_RUN") == "1"
START_SECONDS = 120.0
"""A context on a device that was idle may take a minute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here, and skip it where it cannot run."""
    reason = "no CUDA device is visible to torch; with one, `make cuda` runs this"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            item.add_marker(pytest.mark.timeout(600))
            # Compilers and kernels warn of what they like, which is no reason to do without them.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if not (DRY_RUN or torch.cuda.is_available()):
                item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Device:
    """Where these tests run."""

    device: torch.device
    memory: str
    """As a holder spells it."""

    @property
    def is_real(self) -> bool:
        return self.device.type == "cuda"


@pytest.fixture(scope="session")
def device() -> Device:
    return Device(torch.device("cpu"), "host") if DRY_RUN else Device(torch.device("cuda", 0), "cuda")


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "demo"
    make_demo_model(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Folder of a node's pools."""
    folder = pools_folder(f"test-{uuid.uuid4().hex}", tmp_path)
    yield folder
    NodePools(folder).remove_all()


class HolderProcess:
    """The holder as the agent starts it, on the first visible device."""

    def __init__(self, memory: str, folder: Path) -> None:
        self.socket = socket_of(folder, "GPU-test")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "workers.kv.holder", f"--memory={memory}"),
                *("--accelerator=GPU-test", f"--socket={self.socket}", f"--pools={folder}"),
                "--linger-seconds=0",
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        wait_until(self._is_up, seconds=START_SECONDS)

    def _is_up(self) -> bool:
        assert self.process.poll() is None, "the holder ended; its output says why"
        return is_holder_there(self.socket)

    def status(self) -> Status:
        link = HolderLink(self.socket)
        status, _ = link.ask(AskStatus(), Status)
        link.close()
        return status

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def holder(device: Device, folder: Path) -> Iterator[HolderProcess]:
    holder = HolderProcess(device.memory, folder)
    yield holder
    holder.kill()
