"""Engine logs on disk: their last lines, their size, their number, and what must not leave."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from workers.protocol.confidential import mask

_TAIL_READ_BYTES = 64 * 1024
_KEPT_AFTER_CUT_BYTES = 1024 * 1024
_PORT_TAKEN = re.compile(
    r"address already in use|EADDRINUSE|errno 98\b|only one usage of each socket", re.IGNORECASE
)


def last_lines(path: Path, *, count: int, width: int, secrets: Iterable[str]) -> tuple[str, ...]:
    """Return up to `count` last lines, each cut to `width` characters, secrets masked."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_READ_BYTES))
            data = file.read(_TAIL_READ_BYTES)
    except OSError:
        return ()
    lines = mask(data.decode("utf-8", "replace"), secrets).splitlines()
    if size > _TAIL_READ_BYTES:
        lines = lines[1:]  # begins in the middle
    return tuple(line[:width] for line in lines[-count:])


def tells_port_taken(lines: Iterable[str]) -> bool:
    """True if an engine's last lines say that it could not bind its port."""
    return any(_PORT_TAKEN.search(line) for line in lines)


def cut_if_overgrown(path: Path, cap_bytes: int) -> bool:
    """Keep an engine from filling the disk: over the cap, only the newest part is kept, in `.1`.

    The engine writes with O_APPEND, so it goes on at the new end. Lines written between the copy
    and the cut are lost.
    """
    try:
        if path.stat().st_size <= cap_bytes:
            return False
        with path.open("rb") as file:
            file.seek(-min(_KEPT_AFTER_CUT_BYTES, cap_bytes), os.SEEK_END)
            path.with_suffix(".log.1").write_bytes(file.read(_KEPT_AFTER_CUT_BYTES))
        os.truncate(path, 0)
    except OSError:
        return False  # gone, or the disk is full: the next round tries again
    return True


def prune_attempts(folder: Path, *, keep: int) -> None:
    """Remove the logs of all but a replica's newest attempts."""
    numbered = []
    for path in folder.glob("*.log*"):
        number = path.name.partition(".")[0]
        if number.isdigit():
            numbered.append((int(number), path))
    newest = sorted({attempt for attempt, _ in numbered})[-keep:]
    for attempt, path in numbered:
        if attempt not in newest:
            path.unlink(missing_ok=True)


def prune_replicas(logs: Path, *, known: Iterable[str], keep: int) -> None:
    """Remove the log folders of forgotten replicas, but for the most recently written ones."""
    known = set(known)
    forgotten = [path for path in logs.iterdir() if path.is_dir() and path.name not in known]
    forgotten.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in forgotten[keep:]:
        shutil.rmtree(path, ignore_errors=True)
