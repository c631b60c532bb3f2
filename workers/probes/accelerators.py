"""Accelerators of this node, by the vendor's own tool: no CUDA context, no torch in the agent."""

from __future__ import annotations

import csv
import io
import logging
import shutil
import subprocess
from dataclasses import dataclass

import psutil

from workers.protocol.v1 import AcceleratorInfo

_TOOL_SECONDS = 10.0
_MEBIBYTE = 1024 * 1024
_CPU_MEMORY_RATIO = 0.8
_DEVICE_COLUMNS = ("uuid", "name", "memory.total", "index")
_PROCESS_COLUMNS = ("gpu_uuid", "pid", "used_memory")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AcceleratorProcess:
    """A process that holds memory of an accelerator. 0 bytes: the tool did not say."""

    accelerator_uuid: str
    pid: int
    memory_bytes: int


def discover(node_id: str, *, cpu_memory_bytes: int = 0) -> tuple[AcceleratorInfo, ...]:
    """Find this node's accelerators; one without any offers its CPU as a single one.

    `cpu_memory_bytes` bounds what a CPU offers; 0 means 80% of the host's memory.
    """
    page = _ask_nvidia(f"--query-gpu={','.join(_DEVICE_COLUMNS)}")
    found = parse_devices(page) if page is not None else ()
    return found or (cpu_accelerator(node_id, cpu_memory_bytes),)


def processes() -> tuple[AcceleratorProcess, ...]:
    """Find the processes that hold accelerator memory; empty where no tool tells."""
    page = _ask_nvidia(f"--query-compute-apps={','.join(_PROCESS_COLUMNS)}")
    return parse_processes(page) if page is not None else ()


def cpu_accelerator(node_id: str, memory_bytes: int) -> AcceleratorInfo:
    """The host's CPU as an accelerator; its id is the node's, so it is stable and unique."""
    most = int(psutil.virtual_memory().total * _CPU_MEMORY_RATIO)
    return AcceleratorInfo(
        uuid=f"CPU-{node_id}",
        kind="cpu",
        name=f"CPU, {psutil.cpu_count(logical=True) or 1} threads",
        memory_bytes=min(most, memory_bytes) if memory_bytes else most,
    )


def parse_devices(page: str) -> tuple[AcceleratorInfo, ...]:
    """Read `nvidia-smi --query-gpu` CSV. A value that is no number is 0; a row without id is left out."""
    found = []
    for row in _rows(page, len(_DEVICE_COLUMNS)):
        uuid, name, memory, index = row
        if not uuid.startswith(("GPU-", "MIG-")):
            logger.warning("left out an accelerator without id: %r", row)
            continue
        found.append(
            AcceleratorInfo(
                uuid=uuid,
                kind="cuda",
                name=name,
                memory_bytes=_number(memory) * _MEBIBYTE,
                ordinal=_number(index),
            )
        )
    return tuple(found)


def parse_processes(page: str) -> tuple[AcceleratorProcess, ...]:
    """Read `nvidia-smi --query-compute-apps` CSV; rows without a pid are left out."""
    return tuple(
        AcceleratorProcess(uuid, int(pid), _number(memory) * _MEBIBYTE)
        for uuid, pid, memory in _rows(page, len(_PROCESS_COLUMNS))
        if pid.isdigit()
    )


def _rows(page: str, columns: int) -> list[list[str]]:
    rows = csv.reader(io.StringIO(page), skipinitialspace=True)
    return [[value.strip() for value in row] for row in rows if len(row) == columns]


def _number(text: str) -> int:
    """A whole number; `N/A`, `[Not Supported]`, `ERR!` and the like are 0."""
    return int(text) if text.isdigit() else 0


def _ask_nvidia(query: str) -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        answer = subprocess.run(  # noqa: S603 - the vendor's tool, fixed arguments
            [tool, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi did not answer: %s", type(error).__name__)
        return None
    return answer.stdout
