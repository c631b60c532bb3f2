"""What faults did, as JSON lines, and faults that are asked for while the simulation runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from workers.simulation.faults import Fault, FaultScriptError, parse_fault

BEGIN = "begin"
END = "end"

logger = logging.getLogger(__name__)


class FaultNote(msgspec.Struct, frozen=True, kw_only=True):
    """A fault took effect on a node, or left it."""

    kind: str
    phase: str
    """`begin` or `end`."""
    node: str
    node_id: str
    monotonic_seconds: float
    """Of this machine: the same for all its processes."""
    unix_seconds: float


class FaultJournal:
    """Appends notes to a file that several processes may share: each line is one write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, notes: Sequence[FaultNote]) -> None:
        """Append. Raises `OSError`."""
        if not notes:
            return
        with self._path.open("ab", buffering=0) as file:
            for note in notes:
                file.write(msgspec.json.encode(note) + b"\n")


class FaultInbox:
    """A file to which somebody appends faults, one word a line; each happens once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = self._size()

    def take(self) -> list[Fault]:
        """Faults that were asked for since the last call; lines that are none are logged."""
        if self._size() <= self._read_bytes:
            return []
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [fault for line in whole.decode(errors="replace").split("\n") for fault in _parse(line)]

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


def read_journal(path: Path) -> list[FaultNote]:
    """All notes so far, in the order in which they were written. Raises `OSError`."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [msgspec.json.decode(line, type=FaultNote) for line in whole.splitlines()]


def _parse(line: str) -> list[Fault]:
    if not line.strip():
        return []
    try:
        return [parse_fault(line)]
    except FaultScriptError as error:
        logger.warning("no fault: %s", error)
        return []
