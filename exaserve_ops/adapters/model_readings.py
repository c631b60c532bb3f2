"""Reads models' folders in threads of its own: nobody's request lasts as long as hashing large weights.

A request waits for a moment. Where the folder takes longer it is told how far the reading is, and comes
again; what was read is kept for a while, for whoever asks next. A folder whose files changed meanwhile is
read anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from exaserve_ops.adapters.folder_places import files_below, unreadable
from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.services.models import FolderReading, ModelFacts

WAIT_SECONDS = 3.0
"""How long a request waits for a folder; small models are read within it."""
KEPT_SECONDS = 900.0
MOST_AT_ONCE = 2
"""Folders that are read at once by one process; the others wait for their turn."""

Fingerprint = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class _Reading:
    """One folder that is being read, or was."""

    fingerprint: Fingerprint
    total_bytes: int
    began_seconds: float
    read_bytes: int = 0
    facts: ModelFacts | None = None
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class ModelReadings:
    """Implements the port of pages and REST."""

    def __init__(
        self,
        folder: ModelFolder,
        *,
        wait_seconds: float = WAIT_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._wait_seconds = wait_seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._readings: dict[str, _Reading] = {}

    def read(self, folder: str) -> ModelFacts | FolderReading:
        """Return what a folder holds, or how far it is read. Raises `InvalidInputError` as that does."""
        reading = self._reading_of(folder)
        reading.done.wait(self._wait_seconds)
        if not reading.done.is_set():
            return FolderReading(reading.read_bytes, reading.total_bytes)
        if reading.error is not None:
            with self._lock:
                if self._readings.get(folder) is reading:
                    del self._readings[folder]
            raise reading.error
        if reading.facts is None:
            raise AssertionError("a reading that is done has facts or an error")
        return reading.facts

    def _reading_of(self, folder: str) -> _Reading:
        fingerprint = _fingerprint(self._folder.place(folder))
        now = self._monotonic()
        with self._lock:
            self._forget(now)
            known = self._readings.get(folder)
            if known is not None and (known.fingerprint == fingerprint or not known.done.is_set()):
                return known
            total_bytes = sum(size for _, size, _ in fingerprint)
            reading = self._readings[folder] = _Reading(fingerprint, total_bytes, now)
        threading.Thread(target=self._run, args=(folder, reading), name="model-reading", daemon=True).start()
        return reading

    def _forget(self, now_seconds: float) -> None:
        for folder, reading in list(self._readings.items()):
            if reading.done.is_set() and now_seconds - reading.began_seconds > KEPT_SECONDS:
                del self._readings[folder]

    def _run(self, folder: str, reading: _Reading) -> None:
        def count(read_bytes: int) -> None:
            reading.read_bytes += read_bytes

        try:
            with self._turns:
                reading.facts = self._folder.read(folder, count)
        except (InvalidInputError, OSError) as error:
            reading.error = error
        finally:
            if reading.facts is None and reading.error is None:
                reading.error = RuntimeError(f"reading {folder} ended by itself; the log says why")
            reading.done.set()


def _fingerprint(path: Path) -> Fingerprint:
    """Names, sizes and times of the files: whether a folder is as it was. Cheap: nothing is opened.

    Raises `InvalidInputError` for what cannot be listed.
    """
    try:
        files = [(file.relative_to(path).as_posix(), file.stat()) for file in files_below(path)]
    except OSError as error:
        raise unreadable(error, str(path)) from error
    return tuple(sorted((name, facts.st_size, facts.st_mtime_ns) for name, facts in files))
