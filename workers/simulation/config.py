"""The file that tells the process what to simulate. It holds node keys: mode 0600."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec

from workers.simulation.faults import Fault, Place
from workers.simulation.hardware import NONE_CUT, CutCards
from workers.simulation.identity import NodeIdentity


class ConfigError(Exception):
    """The file cannot be used; the text says why."""


class SimulationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process's share of a simulated fleet."""

    redis_url: str
    seed: int
    nodes: tuple[NodeIdentity, ...]
    places: tuple[Place, ...] = ()
    """Names and racks of the whole fleet."""
    slots: int = 12
    cut_cards: CutCards = NONE_CUT
    """On each node, beside its slots."""
    first_port: int = 41_000
    """Replicas have ports from here on; with `serve` they listen there, on loopback only."""
    requests_per_second: float = 0.4
    """Of one replica, on average."""
    faults: tuple[Fault, ...] = ()
    serve: bool = False
    stamp_queue: bool = False
    fault_journal: str = ""
    """File to which every fault that takes effect is appended; none without a name."""
    fault_inbox: str = ""
    """File from which further faults are taken."""

    def __repr__(self) -> str:
        return f"SimulationConfig({len(self.nodes)} nodes)"


def read_config(path: Path) -> SimulationConfig:
    """Read the file. Raises `ConfigError`, also where others may read it."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"{path} holds node keys and others may read it: chmod 600")
        return msgspec.json.decode(path.read_bytes(), type=SimulationConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
