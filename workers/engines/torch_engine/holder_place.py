"""The holder of this replica's accelerator: who it is, and the memory that both of them mean."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.kv.cuda_driver import CudaDriver
from workers.kv.cuda_memory import CudaMemory
from workers.kv.holder_link import HolderLink
from workers.kv.holder_wire import Hello
from workers.kv.memory import HostMemory, SharedMemory

_GREETING_SECONDS = 20.0
"""Loading has time, and a holder may be making room for another replica's weights."""


@dataclass(frozen=True, slots=True)
class HolderPlace:
    """A holder that answers, and its device as this process has it."""

    link: HolderLink
    memory: SharedMemory
    device: torch.device


def open_place(path: Path, device: torch.device) -> HolderPlace:
    """Connect to a holder. Raises `OSError`: it does not answer, or has another device than this process."""
    with ExitStack() as undo:
        link = HolderLink(path, greeting_seconds=_GREETING_SECONDS)
        undo.callback(link.close)
        memory = _memory_of(device)
        _check_same(link.hello, memory)
        undo.pop_all()
    return HolderPlace(link, memory, device)


def _check_same(hello: Hello, memory: SharedMemory) -> None:
    theirs, ours = (hello.kind, hello.device_uuid), (memory.kind, memory.device_uuid)
    if theirs != ours:
        raise OSError(errno.EINVAL, f"the holder has memory of {theirs}, this replica uses {ours}")


def _memory_of(device: torch.device) -> SharedMemory:
    if device.type != "cuda":
        return HostMemory()
    memory = CudaMemory(CudaDriver(), device.index or 0)
    # Before torch's first tensor: one that lies over foreign memory would not do it.
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no types there
    return memory
