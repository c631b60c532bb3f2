"""Who sits on this node's accelerators: strangers, and replicas that are not where they should be.

Both are reported so that people can see them; neither is touched unless somebody asks for it. A launch
that needs to know whether its memory is free asks for a look at that, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from workers.agent.memory import Occupant, Whose
from workers.agent.processes import LaunchLabel, read_label, read_stat
from workers.probes.accelerators import AcceleratorProbe
from workers.probes.devices import AcceleratorProcess, CardMemory
from workers.protocol.observed import UnknownProcess

_INTERVAL_SECONDS = 10.0
_COMMAND_CHARACTERS = 120
_MOST_SENTENCES = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Places:
    """Where this node's replicas should be."""

    uuids: Mapping[str, Collection[str]]
    """Accelerators by replica id."""
    parents: Mapping[str, str]
    """Card by slice: some releases of the tools name only the card."""


@dataclass(frozen=True, slots=True)
class MemoryLook:
    """The memory of this node's cards at one moment, and whose it is."""

    began_at_seconds: float = float("-inf")
    """Monotonic; what changed later is not in it."""
    cards: Mapping[str, CardMemory] = field(default_factory=dict)
    occupants: tuple[Occupant, ...] = ()


class ForeignWatch:
    """Asks the vendor's tool now and then, in a thread of its own since the tool may hang."""

    def __init__(
        self,
        node_id: str,
        probe: AcceleratorProbe,
        own_sessions: Callable[[], Mapping[int, str]],
        places: Callable[[], Places],
        *,
        on_misplaced: Callable[[], None],
        describe: Callable[[UnknownProcess], UnknownProcess | None],
        on_processes: Callable[[Sequence[AcceleratorProcess]], None] = lambda _: None,
        on_memory: Callable[[], None] = lambda: None,
    ) -> None:
        """Watch for one node.

        `own_sessions` says whose the sessions of processes are that we started: the replica's id, or nothing
        for what serves all replicas. `on_memory` is called after each look at memory that was asked for.
        """
        self._node_id = node_id
        self._probe = probe
        self._own_sessions = own_sessions
        self._places = places
        self._on_misplaced = on_misplaced
        self._describe = describe
        self._on_processes = on_processes
        self._on_memory = on_memory
        self._asked = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foreign", daemon=True)
        self._seen_misplaced: frozenset[str] = frozenset()
        self.found: tuple[UnknownProcess, ...] = ()
        self.misplaced: tuple[str, ...] = ()
        """A sentence for each replica that was off its accelerators at two looks in a row."""
        self.memory = MemoryLook()
        """The last that was asked for. Replaced whole: any thread may read."""

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; a tool that hangs is not waited for."""
        self._stopping.set()
        self._asked.set()

    def ask_memory(self) -> None:
        """Have a look at the memory of all cards as soon as can be; it comes as `memory`."""
        self._asked.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            asked = self._asked.is_set()
            self._asked.clear()
            try:
                self.found = self.look(with_memory=asked)
            except Exception:  # top of the loop: an odd tool must not end the watch
                logger.exception("looking for foreign accelerator processes failed")
            if asked:
                self._on_memory()
            self._asked.wait(_INTERVAL_SECONDS)

    def look(self, *, with_memory: bool = False) -> tuple[UnknownProcess, ...]:
        """Return the processes on accelerators that are no replica of this node."""
        began = time.monotonic()
        sessions = self._own_sessions()
        processes = self._probe.processes()
        if with_memory:
            # Processes first: one that starts in between counts as unnamed, and is never counted twice.
            cards = self._probe.memory()
            occupants = tuple(self._occupant(process, sessions) for process in processes)
            self.memory = MemoryLook(began, cards, occupants)
        labels = {process.pid: read_label(process.pid) for process in processes}
        self._note_misplaced(processes, labels)
        self._on_processes(processes)
        strangers = (
            UnknownProcess(
                pid=process.pid,
                accelerator_uuid=process.accelerator_uuid,
                memory_bytes=process.memory_bytes or 0,
                command=_command(process.pid),
            )
            for process in processes
            if not self._is_ours(process.pid, labels[process.pid], sessions)
        )
        described = (self._describe(stranger) for stranger in strangers)
        return tuple(stranger for stranger in described if stranger is not None)

    def _note_misplaced(
        self, processes: Iterable[AcceleratorProcess], labels: Mapping[int, LaunchLabel | None]
    ) -> None:
        own = {
            pid: label.replica_id
            for pid, label in labels.items()
            if label is not None and label.node_id == self._node_id
        }
        now = find_misplaced(processes, own, self._places())
        # Once is no proof: the wish may have changed while the old attempt is still being stopped.
        before = self.misplaced
        self.misplaced = tuple(sentence for sentence in now if sentence in self._seen_misplaced)[
            :_MOST_SENTENCES
        ]
        self._seen_misplaced = frozenset(now)
        if self.misplaced != before:
            for sentence in self.misplaced:
                logger.warning("event=replica_misplaced %s", sentence)
            self._on_misplaced()

    def _occupant(self, process: AcceleratorProcess, sessions: Mapping[int, str]) -> Occupant:
        label, stat = read_label(process.pid), read_stat(process.pid)
        owner = label.replica_id if label is not None and label.node_id == self._node_id else None
        if owner is None and stat is not None:
            owner = sessions.get(stat.session)
        whose = Whose.STRANGER if owner is None else Whose.REPLICA if owner else Whose.HOLDER
        return Occupant(
            accelerator_uuid=process.accelerator_uuid,
            pid=process.pid,
            memory_bytes=process.memory_bytes,
            whose=whose,
            replica_id=owner or "",
            command=_command(process.pid) if whose is Whose.STRANGER else "",
        )

    def _is_ours(self, pid: int, label: LaunchLabel | None, sessions: Collection[int]) -> bool:
        stat = read_stat(pid)
        labelled = label is not None and label.node_id == self._node_id
        return labelled or (stat is not None and stat.session in sessions)


def find_misplaced(
    processes: Iterable[AcceleratorProcess], replicas: Mapping[int, str], places: Places
) -> tuple[str, ...]:
    """Sentences about own processes (pid → replica id) on accelerators that are not their replica's."""
    found = []
    for process in processes:
        replica_id = replicas.get(process.pid)
        wanted = None if replica_id is None else places.uuids.get(replica_id)
        if wanted is None:
            continue  # a stranger, or a replica on its way out
        allowed = {*wanted, *(places.parents[uuid] for uuid in wanted if uuid in places.parents)}
        if process.accelerator_uuid not in allowed:
            found.append(
                f"replica {replica_id} (pid {process.pid}) holds memory of {process.accelerator_uuid}, "
                f"not of {', '.join(sorted(wanted)) or 'any accelerator of its own'}"
            )
    return tuple(found)


def _command(pid: int) -> str:
    """Name of the program; not its arguments, which may hold somebody's secrets."""
    try:
        return psutil.Process(pid).name()[:_COMMAND_CHARACTERS]
    except psutil.Error:
        return ""
