"""Which task of an allocation this process is, as `srun` and `mpiexec` say in the environment."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID")
_LOCAL_RANKS = (
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "PMI_LOCAL_RANK",
)
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


class NoTaskError(Exception):
    """The environment does not say which task this is; the text says what was looked for."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a launcher."""

    host: str
    rank: int
    local_rank: int

    @property
    def label(self) -> str:
        """Host and, for every task but the host's first, its number there: one for each agent of a fleet."""
        return self.host if self.local_rank == 0 else f"{self.host}-{self.local_rank}"

    def home(self, base: Path) -> Path:
        """Home of this task's agent. By host and local rank, so that a later allocation finds it again."""
        return base / self.label

    def name(self, base: str) -> str:
        """Name of this task's node; `base`, if given, stands before it."""
        return f"{base}-{self.label}" if base else self.label


def task_of(environ: Mapping[str, str], *, host: str = "") -> Task:
    """Read the environment. Raises `NoTaskError` where no launcher has set it."""
    rank = _first(environ, _RANKS)
    if rank is None:
        raise NoTaskError(
            f"--per-task needs a launcher such as srun or mpiexec: none of {', '.join(_RANKS)} is set"
        )
    local_rank = _first(environ, _LOCAL_RANKS)
    # The short name: an allocation's hosts share their domain, and node names are for people.
    short = (host or environ.get("SLURMD_NODENAME") or platform.node()).split(".")[0]
    label = _UNFIT.sub("-", short).strip("-.") or "node"
    return Task(label, rank, local_rank if local_rank is not None else 0)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environ.get(name, "")
        if text.isdigit():
            return int(text)
    return None
