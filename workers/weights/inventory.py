"""What a store has, kept in mind so that a look costs nothing while nothing changes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workers.weights.checks import DamagedError, check_sizes
from workers.weights.fetching import FetchProgress
from workers.weights.marks import MARKS, count_marks
from workers.weights.planning import Ready
from workers.weights.shelf import Shelf, key_of

_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class HeldFacts:
    """One whole revision."""

    total_bytes: int
    in_use: bool
    damaged_pieces: int
    sources: Mapping[tuple[str, str], int]
    """Verified bytes by (kind, name)."""


class Inventory:
    """Whole and staged revisions of one shelf. Safe to use from several threads; may raise `OSError`."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._lock = threading.RLock()
        self._ready: dict[str, int] = {}
        """Whole revisions, and what removing each frees."""
        self._hidden: set[str] = set()
        """Whole by their folders, and found damaged: nothing is started from them."""
        self._used_by: frozenset[str] = frozenset()
        self.used_bytes = 0
        self.damaged_bytes = 0

    def look(self) -> None:
        """Read the folders again."""
        with self._lock:
            ready = self.shelf.ready()
            self._ready = {
                revision: self.shelf.own_bytes(revision)
                for revision in ready
                if self.shelf.manifest(revision) is not None
            }
            # Without its manifest nobody can say what it is: a crash of old, or somebody else's files.
            for revision in set(ready) - self._ready.keys():
                self.shelf.remove(revision)
            self.used_bytes = self.shelf.used_bytes()
            self.damaged_bytes = sum(f.stat().st_size for f in (self.shelf.root / "damaged").iterdir())

    def is_ready(self, revision: str) -> bool:
        """Whether a revision is whole, as far as is known."""
        with self._lock:
            return revision in self._ready and revision not in self._hidden

    def ready(self) -> list[str]:
        """Whole revisions, the one that was checked longest ago first."""
        with self._lock:
            return sorted(
                (revision for revision in self._ready if revision not in self._hidden),
                key=lambda revision: self.shelf.facts_of(revision).checked,
            )

    def ready_facts(self, in_use: Collection[str]) -> dict[str, Ready]:
        """What can be evicted, and at what gain."""
        with self._lock:
            return {
                revision: Ready(own_bytes, self.shelf.facts_of(revision).used, revision in in_use)
                for revision, own_bytes in self._ready.items()
                if revision not in self._hidden
            }

    def staged_bytes(self) -> dict[str, int]:
        """What each staged revision takes on the disk."""
        return {
            revision: _taken_bytes(self.shelf.root / "staged" / key_of(revision))
            for revision in self.shelf.staged()
        }

    def staged_have_bytes(self) -> dict[str, int]:
        """What is verified of each staged revision, to within a piece."""
        found = {}
        for revision in self.shelf.staged():
            known = self.shelf.manifest(revision)
            if known is not None:
                pieces = count_marks(self.shelf.root / "staged" / key_of(revision) / MARKS)
                found[revision] = min(known[1].total_bytes, pieces * known[1].piece_bytes)
        return found

    def held(self, in_use: Collection[str]) -> dict[str, HeldFacts]:
        """All whole revisions."""
        with self._lock:
            found = {}
            for revision in self._ready.keys() - self._hidden:
                known = self.shelf.manifest(revision)
                total = known[1].total_bytes if known else 0
                facts = self.shelf.facts_of(revision)
                sources = {
                    (key.split(" ", 1)[0], key.split(" ", 1)[-1]): n for key, n in facts.sources.items()
                }
                found[revision] = HeldFacts(total, revision in in_use, facts.damaged_pieces, sources)
            return found

    # -- suspicion and damage --------------------------------------------------------------------
    def suspicion(self, revision: str) -> str:
        """Why a whole revision is to be read again before it is used; empty: no reason.

        Raises `DamagedError` where a file is missing or has another size.
        """
        known = self.shelf.manifest(revision)
        if known is None:
            return "its manifest is gone"
        folder = self.shelf.ready_folder(revision)
        check_sizes(folder, known[1])
        stamps = self.shelf.facts_of(revision).stamps
        changed = [f.path for f in known[1].files if stamps.get(f.path) != _stamp(folder / f.path)]
        return f"{changed[0]} was touched since it was verified" if changed else ""

    def broken_files(self, revision: str) -> list[str]:
        """Files of a whole revision that are missing or have another size."""
        known = self.shelf.manifest(revision)
        folder = self.shelf.ready_folder(revision)
        broken = []
        for file in known[1].files if known else ():
            try:
                is_broken = (folder / file.path).lstat().st_size != file.size_bytes
            except OSError:
                is_broken = True
            if is_broken or (folder / file.path).is_symlink():
                broken.append(file.path)
        return broken

    def hide(self, revision: str) -> None:
        """Let nothing be started from it any more."""
        with self._lock:
            self._hidden.add(revision)

    def take_back(self, revision: str, paths: Collection[str]) -> None:
        """Make a damaged revision a staged one without those files."""
        with self._lock:
            if revision in self._ready:
                known = self.shelf.manifest(revision)
                damaged = [f for f in known[1].files if f.path in paths] if known else []
                self.shelf.unstage_damaged(revision, [f.path for f in damaged]).close()
                self.shelf.facts_of(revision).damaged_pieces += max(1, len(damaged))
                self.shelf.save_facts()
            self._hidden.discard(revision)
            self.look()

    # -- changes ---------------------------------------------------------------------------------
    def note_activated(self, revision: str) -> None:
        """Take a revision that was put into its place."""
        with self._lock:
            self._hidden.discard(revision)
            self._stamp(revision)
            self._number(revision, "used")
            self._number(revision, "checked")
            self.shelf.save_facts()
            self.look()

    def note_checked(self, revision: str) -> None:
        """Take note that all of it was read and is what it should be."""
        with self._lock:
            if revision in self._ready:
                self._stamp(revision)
                self._number(revision, "checked")
                self.shelf.save_facts()

    def note_use(self, in_use: frozenset[str]) -> None:
        """Take note of what replicas run from, for the order in which others go."""
        with self._lock:
            if in_use == self._used_by:
                return
            for revision in sorted(self._used_by | in_use):
                if revision in self._ready:
                    self._number(revision, "used")
            self._used_by = in_use
            self.shelf.save_facts()

    def note_sources(self, revision: str, progress: FetchProgress) -> None:
        """Remember where its bytes came from."""
        with self._lock:
            facts = self.shelf.facts_of(revision)
            for (kind, name), count in progress.sources.items():
                key = f"{kind} {name}"
                facts.sources[key] = facts.sources.get(key, 0) + count
            facts.damaged_pieces += progress.damaged_pieces
            self.shelf.save_facts()

    def note_imported(self, revision: str, source: str, total_bytes: int) -> None:
        """Remember that an import brought it, unless something is remembered of it already."""
        with self._lock:
            facts = self.shelf.facts_of(revision)
            facts.sources = facts.sources or {source: total_bytes}

    def evict(self, revision: str) -> None:
        """Delete a whole revision."""
        with self._lock:
            self.shelf.remove(revision)
            self.look()

    def drop_staged(self, revision: str) -> None:
        """Delete what was fetched of a revision that nobody wants."""
        with self._lock:
            shutil.rmtree(self.shelf.root / "staged" / key_of(revision), ignore_errors=True)
            if revision not in self._ready:
                self.shelf.forget(revision)
            self.look()

    def delete_damaged(self) -> None:
        """Delete files that were put aside."""
        with self._lock:
            self.shelf.delete_damaged()
            self.look()

    def _stamp(self, revision: str) -> None:
        known = self.shelf.manifest(revision)
        folder = self.shelf.ready_folder(revision)
        stamps = {f.path: _stamp(folder / f.path) for f in known[1].files} if known else {}
        self.shelf.facts_of(revision).stamps = stamps

    def _number(self, revision: str, name: str) -> None:
        newest = max((getattr(facts, name) for facts in self.shelf.facts.values()), default=0)
        setattr(self.shelf.facts_of(revision), name, newest + 1)


def _stamp(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be looked at: {error.strerror}") from error


def _taken_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            stat = path.lstat()
            # What is linked elsewhere is not this one's.
            total += stat.st_blocks * _BLOCK_BYTES if stat.st_nlink == 1 and path.is_file() else 0
    return total
