"""Moving blocks to and from the disk beside the thread that computes, which never waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from workers.kv.tiers.slot_file import DamagedBlockError, SlotFile
from workers.kv.tiers.slots import Place

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Write content to its place."""

    digest: bytes
    place: Place
    content: bytes


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Read content from its place, for a fetch."""

    digest: bytes
    place: Place
    ticket: int
    """Names the read for whoever asked for it."""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a job."""

    job: WriteJob | ReadJob
    content: bytes | bytearray | None = None
    """What was read; `None` if nothing could be."""
    damage: str = ""
    """The slot holds something else than was written."""
    error: str = ""
    """The disk cannot be used."""
    seconds: float = 0.0


class BlockIo(Protocol):
    """Carries jobs out: writes in their order, a read before any write that was asked for later."""

    @property
    def write_room(self) -> int:
        """Writes that would be taken now."""
        ...

    def submit(self, job: WriteJob | ReadJob) -> None:
        """Queue a job. More writes than there is room for are a mistake of the caller's."""
        ...

    def collect(self) -> list[Done]:
        """What was done since the last call."""
        ...

    def close(self) -> None:
        """Drop all jobs and give the disk's room back soon."""
        ...


class IoThread:
    """One thread that does a replica's reads and writes; reads go first, since somebody waits for them."""

    def __init__(self, file: SlotFile, *, write_places: int) -> None:
        """Start the thread."""
        self._file = file
        self._write_places = write_places
        self.on_read: Callable[[], None] = lambda: None
        """Called by the thread after each read."""
        self._reads: deque[ReadJob] = deque()
        self._writes: deque[WriteJob] = deque()
        self._done: deque[Done] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    @property
    def write_room(self) -> int:
        """Writes that would be taken now."""
        return max(0, self._write_places - len(self._writes))

    def submit(self, job: WriteJob | ReadJob) -> None:
        """Queue a job."""
        with self._changed:
            if isinstance(job, ReadJob):
                self._reads.append(job)
            else:
                self._writes.append(job)
            self._changed.notify()

    def collect(self) -> list[Done]:
        """What was done since the last call."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def close(self) -> None:
        """Drop all jobs; the thread gives the disk's room back after the job in progress."""
        with self._changed:
            self._closing = True
            self._reads.clear()
            self._writes.clear()
            self._changed.notify()

    def join(self) -> None:
        """Wait until the room is given back, but not for a disk that hangs."""
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("the disk has not answered for %g s", _CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._reads or self._writes or self._closing):
                    self._changed.wait()
                if self._closing:
                    self._file.close()
                    return
                job = self._reads.popleft() if self._reads else self._writes.popleft()
            self._done.append(carry_out(self._file, job))
            if isinstance(job, ReadJob):
                self.on_read()


def carry_out(file: SlotFile, job: WriteJob | ReadJob) -> Done:
    """Do one job; whatever goes wrong is part of the answer."""
    began = time.monotonic()
    try:
        if isinstance(job, WriteJob):
            file.write(job.place.slot, job.place.generation, job.digest, job.content)
            return Done(job, seconds=time.monotonic() - began)
        content = file.read(job.place.slot, job.place.generation, job.digest)
    except DamagedBlockError as error:
        return Done(job, damage=str(error))
    except OSError as error:
        return Done(job, error=str(error))
    return Done(job, content, seconds=time.monotonic() - began)
