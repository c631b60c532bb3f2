"""How much memory each replica really takes: on its cards, or of the machine's where it runs on a CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from workers.agent.journal import AttemptRow
from workers.agent.processes import all_stats, read_stat
from workers.probes.devices import AcceleratorProcess

_KIB = 1024


class Footprints:
    """Adds up the processes of each replica, whenever the vendors' tools have named those on cards."""

    def __init__(
        self, attempts: Callable[[], Iterable[AttemptRow]], on_cards: Callable[[], Mapping[str, bool]]
    ) -> None:
        """Look at `attempts`; `on_cards` says of replicas by id whether they run on cards."""
        self._attempts = attempts
        self._on_cards = on_cards
        self.used_bytes: Mapping[str, int] = {}
        """By replica id, without those that could not be read. Replaced whole: any thread may read."""

    def take(self, processes: Iterable[AcceleratorProcess]) -> None:
        """Take in what is on the cards now, and look at the machine's own memory for the others."""
        sessions = {row.pid: row.replica_id for row in self._attempts() if row.pid is not None}
        placed = self._on_cards()
        cards = _on_cards(processes, sessions)
        hosted = {pid: replica for pid, replica in sessions.items() if not placed.get(replica, True)}
        self.used_bytes = {**cards, **_on_host(hosted)}


def _on_cards(processes: Iterable[AcceleratorProcess], sessions: Mapping[int, str]) -> dict[str, int]:
    used: dict[str, int] = defaultdict(int)
    for process in processes:
        stat = read_stat(process.pid)
        replica = sessions.get(stat.session) if stat is not None else None
        if replica is not None and process.memory_bytes is not None:
            used[replica] += process.memory_bytes
    return dict(used)


def _on_host(sessions: Mapping[int, str]) -> dict[str, int]:
    if not sessions:
        return {}
    used: dict[str, int] = defaultdict(int)
    for stat in all_stats():
        replica = sessions.get(stat.session)
        size = _proportional_bytes(stat.id.pid) if replica is not None else None
        if replica is not None and size is not None:
            used[replica] += size
    return dict(used)


def _proportional_bytes(pid: int) -> int | None:
    """Memory of a process, what it shares with others counted in part; `None` if it cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("Pss:")), "")
    fields = found.split()
    return int(fields[1]) * _KIB if len(fields) > 1 and fields[1].isdigit() else None
