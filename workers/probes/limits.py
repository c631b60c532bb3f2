"""What this process may use of the host: a container's cgroup beats the machine's totals."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/sys/fs/cgroup")
_PROC_SELF = Path("/proc/self/cgroup")
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """`None`: no limit, or none that can be read."""

    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    """Of the group that has the limit, without what the kernel would drop by itself."""
    cpus: float | None = None


def read_limits(root: Path = _ROOT, proc_cgroup: Path = _PROC_SELF) -> Limits:
    """Read the tightest limits on the way from this process's cgroup (version 2) to the root."""
    memory: tuple[int, Path] | None = None
    cpus: float | None = None
    for folder in _folders(root, _read(proc_cgroup)):
        size = _whole(_read(folder / "memory.max"))
        if size is not None and (memory is None or size < memory[0]):
            memory = (size, folder)
        share = parse_cpu_max(_read(folder / "cpu.max"))
        if share is not None and (cpus is None or share < cpus):
            cpus = share
    if memory is None:
        return Limits(cpus=cpus)
    return Limits(memory[0], _used(memory[1]), cpus)


def usable_cpu_count(limits: Limits) -> int:
    """Cores for this node's work: at least one, a part of a core counts as one."""
    affinity = getattr(os, "sched_getaffinity", None)
    here = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, here if limits.cpus is None else min(here, math.ceil(limits.cpus)))


def usable_memory_bytes(limits: Limits) -> int:
    """Memory for this node's work."""
    total = psutil.virtual_memory().total
    return total if limits.memory_bytes is None else min(total, limits.memory_bytes)


def parse_cpu_max(text: str) -> float | None:
    """Cores of `cpu.max`, such as `200000 100000`; `None` for `max` and for anything else."""
    words = text.split()
    if len(words) != 2:  # noqa: PLR2004 - quota and period
        return None
    quota, period = _whole(words[0]), _whole(words[1])
    return quota / period if quota and period else None


def _folders(root: Path, membership: str) -> list[Path]:
    """The process's own group first. In a container of its own the group is the root itself."""
    line = next((line for line in membership.splitlines() if line.startswith("0::/")), "0::/")
    path = PurePosixPath(line.removeprefix("0::/"))
    if ".." in path.parts or len(path.parts) > _DEEPEST:
        return [root]  # a group outside of what is mounted here
    group = root / path
    return [group, *(parent for parent in group.parents if parent == root or root in parent.parents)]


def _used(folder: Path) -> int | None:
    used = _whole(_read(folder / "memory.current"))
    if used is None:
        return None
    stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    return max(0, used - (_whole(stat.get("inactive_file", "")) or 0))


def _whole(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 19 else None  # noqa: PLR2004 - 64 bits


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
