"""What is done of an import, on disk: an agent that was killed goes on where the disk has it for sure.

::

    <store>/imports/<id>/progress    what was listed, which files are whole, how far others are synced
    <store>/imports/<id>/files/      the files; gone from here once they are a revision in `ready`
    <store>/imports/<id>/findings    what was found, until the control plane has recorded it
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from workers.protocol.imports import WeightsImport
from workers.protocol.manifest import ManifestFile
from workers.weights.imports.listing import ListedFile, Listing, changed_paths
from workers.weights.shelf import write_whole

WRITE_SECONDS = 2.0
_PROGRESS = "progress"
_FINDINGS = "findings"
FILES = "files"


class _Progress(msgspec.Struct, array_like=True):
    asked: tuple[str, ...] = ()
    """What was asked for; of something else nothing is kept."""
    listing: Listing | None = None
    whole: dict[str, ManifestFile] = {}
    synced: dict[str, int] = {}
    """Bytes of files that are not whole; only what the disk has for sure."""


class ImportRecord:
    """The folder of one import. Takes notes from several threads; all may raise `OSError`."""

    def __init__(
        self, folder: Path, order: WeightsImport, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        self.files = folder / FILES
        self._clock = clock
        self._lock = threading.Lock()
        self._written_at = clock()
        self._asked = (order.kind, order.location, order.revision, *order.files)
        self._progress = self._read()
        if self._progress.asked != self._asked:
            shutil.rmtree(folder, ignore_errors=True)
            self._progress = _Progress(asked=self._asked)
        self.files.mkdir(parents=True, exist_ok=True)

    @property
    def listing(self) -> Listing | None:
        """What was listed last; `None` before."""
        return self._progress.listing

    def take_listing(self, listing: Listing) -> set[str]:
        """Go on by this listing. Returns the files that are not what they were; these are begun anew."""
        before = self._progress.listing
        changed = changed_paths(before, listing) if before is not None else set()
        with self._lock:
            self._progress.listing = listing
            for path in changed:
                self._forget(path)
            self._write()
        return changed

    def whole(self, path: str) -> ManifestFile | None:
        """A file that is whole and synced, with its digests."""
        return self._progress.whole.get(path)

    def synced_bytes(self, path: str) -> int:
        """How much of a file is on the disk for sure."""
        return self._progress.synced.get(path, 0)

    def missing(self) -> list[ListedFile]:
        """Files that are not whole, the largest first."""
        listing = self._progress.listing
        left = [file for file in (listing.files if listing else ()) if file.path not in self._progress.whole]
        return sorted(left, key=lambda file: (-file.size_bytes, file.path))

    def manifest_files(self) -> tuple[ManifestFile, ...]:
        """All files by path, once they are whole. Raises `KeyError` before."""
        listing = self._progress.listing
        return tuple(self._progress.whole[file.path] for file in (listing.files if listing else ()))

    def note_synced(self, path: str, synced_bytes: int) -> None:
        """Take note that so much of a file is on the disk."""
        with self._lock:
            self._progress.synced[path] = synced_bytes
            self._write_now_and_then()

    def note_whole(self, file: ManifestFile) -> None:
        """Take note that a file is whole and on the disk."""
        with self._lock:
            self._progress.whole[file.path] = file
            self._progress.synced.pop(file.path, None)
            self._write_now_and_then()

    def flush(self) -> None:
        """Write down what was noted."""
        with self._lock:
            self._write()

    def findings(self) -> bytes | None:
        """What was found, once it was; `None` before."""
        with suppress(FileNotFoundError):
            return (self.folder / _FINDINGS).read_bytes()
        return None

    def keep_findings(self, data: bytes) -> None:
        """Keep what was found, until somebody has recorded it."""
        write_whole(self.folder / _FINDINGS, data)

    def forget_findings(self) -> None:
        """What was found is not here any more: begin again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._progress = _Progress(asked=self._asked)
        self.files.mkdir(parents=True, exist_ok=True)

    def _forget(self, path: str) -> None:
        self._progress.whole.pop(path, None)
        self._progress.synced.pop(path, None)
        (self.files / path).unlink(missing_ok=True)

    def _read(self) -> _Progress:
        try:
            return msgspec.msgpack.decode((self.folder / _PROGRESS).read_bytes(), type=_Progress)
        except (FileNotFoundError, msgspec.DecodeError):
            return _Progress(asked=self._asked)

    def _write_now_and_then(self) -> None:
        # Losing a few seconds of notes costs reading these files again, and writing all of them takes time.
        if self._clock() - self._written_at >= WRITE_SECONDS:
            self._write()

    def _write(self) -> None:
        write_whole(self.folder / _PROGRESS, msgspec.msgpack.encode(self._progress))
        self._written_at = self._clock()
