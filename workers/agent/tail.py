"""Following a replica's log for somebody who reads it, in small batches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from workers.agent import logs
from workers.agent.journal import Journal
from workers.protocol.confidential import mask
from workers.protocol.v1 import LogChunk, TailLog

_INTERVAL_SECONDS = 0.25
_CHUNK_BYTES = 64 * 1024
_LINE_CHARACTERS = 4096
_BACKLOG_LINES = 1000
_LONGEST_SECONDS = 600.0
_READ_BYTES = 1024 * 1024
"""Read at most per round; what the log grew beyond it is skipped and counted."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LogFollower:
    """A place in one growing file. Copes with a file that is cut, and with half lines."""

    path: Path
    position: int = 0
    rest: bytes = b""

    def read(self) -> tuple[list[bytes], int]:
        """Return complete lines that are new, and how many were skipped."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self.position:  # cut: begin again
                    self.position, self.rest = 0, b""
                skipped = self._skip(file.seek, file.read, size)
                file.seek(self.position)
                data = file.read(_READ_BYTES)
        except FileNotFoundError:
            return [], 0
        self.position += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _READ_BYTES:
            lines, self.rest = [*lines, self.rest], b""
        return lines, skipped

    def _skip(self, seek: Callable[[int], int], read: Callable[[int], bytes], size: int) -> int:
        """Jump over what is too much for one round; count the lines jumped over."""
        skipped = 0
        seek(self.position)
        while size - self.position > _READ_BYTES:
            part = read(min(_READ_BYTES, size - self.position - _READ_BYTES))
            if not part:
                break
            skipped += part.count(b"\n")
            self.position += len(part)
            self.rest = b""
        return skipped


def fit(lines: list[str], limit_bytes: int) -> tuple[tuple[str, ...], int]:
    """Keep the newest lines that fit in the limit. Returns them and how many were dropped."""
    kept: list[str] = []
    used = 0
    for line in reversed(lines):
        used += len(line.encode()) + 4
        if used > limit_bytes:
            break
        kept.append(line)
    kept.reverse()
    return tuple(kept), len(lines) - len(kept)


@dataclass(slots=True)
class _Tail:
    until: float
    attempt: int
    follower: LogFollower
    secrets: tuple[str, ...] = field(repr=False, default=())


class LogTailer:
    """Sends new log lines of the replicas that somebody watches, at most four times a second."""

    def __init__(
        self,
        node_id: str,
        logs_folder: Path,
        journal: Journal,
        secret_of: Callable[[str, int], str],
        report: Callable[[LogChunk], None],
    ) -> None:
        self._node_id = node_id
        self._folder = logs_folder
        self._journal = journal
        self._secret_of = secret_of
        self._report = report
        self._lock = threading.Lock()
        self._tails: dict[str, _Tail] = {}
        self._asked = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-tail", daemon=True)

    def start(self) -> None:
        """Start the thread; it rests while nobody watches."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._asked.set()
        if self._thread.ident is not None:
            self._thread.join()

    def follow(self, command: TailLog) -> None:
        """Watch a replica's log for a while, or for longer if it is watched already."""
        until = time.monotonic() + min(max(command.seconds, 0.0), _LONGEST_SECONDS)
        with self._lock:
            known = self._tails.get(command.replica_id)
            if known is not None:
                known.until = max(known.until, until)
                return
        row = self._journal.find_replica(command.replica_id)
        attempt = row.last_attempt if row else 0
        tail = self._open(command.replica_id, attempt, until)
        backlog = logs.last_lines(
            tail.follower.path,
            count=min(command.backlog_lines, _BACKLOG_LINES),
            width=_LINE_CHARACTERS,
            secrets=tail.secrets,
        )
        tail.follower.position = _size(tail.follower.path)
        self._send(command.replica_id, attempt, list(backlog), 0, is_backlog=True)
        with self._lock:
            self._tails[command.replica_id] = tail
        self._asked.set()

    def _open(self, replica_id: str, attempt: int, until: float) -> _Tail:
        path = self._folder / replica_id / f"{attempt}.log"
        secrets = (self._secret_of(replica_id, attempt),)
        return _Tail(until, attempt, LogFollower(path), secrets)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                now = time.monotonic()
                self._tails = {key: t for key, t in self._tails.items() if t.until > now}
                tails = list(self._tails.items())
                if not tails:
                    self._asked.clear()
            for replica_id, tail in tails:
                try:
                    self._step(replica_id, tail)
                except Exception:  # top of the loop: one log must not end the others
                    logger.exception("following the log of %s failed", replica_id)
            if tails:
                self._stopping.wait(_INTERVAL_SECONDS)
            else:
                self._asked.wait()

    def _step(self, replica_id: str, tail: _Tail) -> None:
        raw, skipped = tail.follower.read()
        lines = [_clean(line, tail.secrets) for line in raw]
        if lines or skipped:
            self._send(replica_id, tail.attempt, lines, skipped)
            return
        row = self._journal.find_replica(replica_id)
        if row is not None and row.last_attempt > tail.attempt:
            with self._lock:
                self._tails[replica_id] = self._open(replica_id, row.last_attempt, tail.until)

    def _send(
        self, replica_id: str, attempt: int, lines: list[str], skipped: int, *, is_backlog: bool = False
    ) -> None:
        kept, dropped = fit(lines, _CHUNK_BYTES)
        self._report(
            LogChunk(
                node_id=self._node_id,
                replica_id=replica_id,
                attempt=attempt,
                lines=kept,
                dropped_lines=skipped + dropped,
                is_backlog=is_backlog,
            )
        )


def _clean(line: bytes, secrets: tuple[str, ...]) -> str:
    text = mask(line.decode("utf-8", "replace").rstrip("\r"), secrets)
    return text if len(text) <= _LINE_CHARACTERS else text[: _LINE_CHARACTERS - 1] + "…"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
