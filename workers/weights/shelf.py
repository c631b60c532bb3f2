"""What lies on a node's disk: whole revisions, staged ones, and files that were found damaged.

::

    <root>/lock                  held by the agent that owns the store: a kernel lock, gone when it dies
    <root>/ready/<revision>/     files as engines see them; only ever renamed into place whole
    <root>/staged/<revision>/    files on their way, with marks of the pieces that are verified
    <root>/imports/<import>/     models that come from where there is no manifest (`imports.records`)
    <root>/manifests/<revision>  the manifest of each of them, named inside by its digest
    <root>/damaged/              files whose bytes changed on the disk, kept for whoever wants to know why
    <root>/facts.json            when each revision was used and checked last

A `<revision>` is the hex part of a model's digest.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from workers.protocol import manifest as manifests
from workers.protocol.manifest import Manifest, ManifestError
from workers.weights.checks import check_shards, check_sizes
from workers.weights.staging import Staged, seal_folder, sync_folder

_HEX = 64


class StoreTakenError(Exception):
    """Another agent owns this store."""


class RevisionFacts(msgspec.Struct, omit_defaults=True):
    """What is remembered of a revision. Uses and checks are numbered, since clocks may be set back."""

    used: int = 0
    """Number of the last use: the smallest goes first."""
    checked: int = 0
    stamps: dict[str, int] = {}
    """When each file was changed last, in nanoseconds, as it was put here: another time is a suspicion."""
    sources: dict[str, int] = {}
    """Verified bytes by `kind name`."""
    damaged_pieces: int = 0


class _KeptManifest(msgspec.Struct, frozen=True, array_like=True):
    digest: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that a store is on, in bytes."""

    total_bytes: int
    free_bytes: int


class Shelf:
    """The folder of one store. Decides nothing; all its methods may raise `OSError`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock_fd = -1
        self._manifests: dict[str, tuple[str, Manifest]] = {}
        self.facts: dict[str, RevisionFacts] = {}

    # -- ownership -------------------------------------------------------------------------------
    def open(self) -> None:
        """Own the store until the process ends. Raises `StoreTakenError`."""
        self.root.mkdir(parents=True, exist_ok=True)
        if self._lock_fd < 0:
            fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(fd)
                raise StoreTakenError(f"{self.root} belongs to another agent that runs") from error
            self._lock_fd = fd
        for name in ("ready", "staged", "imports", "manifests", "damaged"):
            (self.root / name).mkdir(exist_ok=True)
        self._load_facts()

    def close(self) -> None:
        """Let go of the store."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = -1

    def disk(self) -> Disk:
        """Size and room of the disk."""
        stat = os.statvfs(self.root)
        return Disk(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)

    # -- manifests -------------------------------------------------------------------------------
    def keep_manifest(self, digest: str, body: bytes) -> Manifest:
        """Keep a manifest. Raises `ManifestError` for bytes that are not the ones of that name."""
        manifest = manifests.decode(body, digest)
        kept = msgspec.msgpack.encode(_KeptManifest(digest, body))
        path = self.root / "manifests" / key_of(manifest.revision)
        write_whole(path, kept)
        self._manifests[manifest.revision] = (digest, manifest)
        return manifest

    def manifest(self, revision: str) -> tuple[str, Manifest] | None:
        """Digest and content of a revision's manifest; `None` where none is here, or it is damaged."""
        known = self._manifests.get(revision)
        if known is None:
            try:
                data = (self.root / "manifests" / key_of(revision)).read_bytes()
                kept = msgspec.msgpack.decode(data, type=_KeptManifest)
                manifest = manifests.decode(kept.body, kept.digest)
            except (FileNotFoundError, msgspec.DecodeError, ManifestError):
                return None
            if manifest.revision != revision:
                return None
            known = self._manifests[revision] = (kept.digest, manifest)
        return known

    # -- revisions -------------------------------------------------------------------------------
    def ready(self) -> list[str]:
        """Revisions that are whole."""
        return self._revisions("ready")

    def staged(self) -> list[str]:
        """Revisions that are on their way."""
        return self._revisions("staged")

    def ready_folder(self, revision: str) -> Path:
        """Where a whole revision's files are."""
        return self.root / "ready" / key_of(revision)

    def stage(self, revision: str) -> Staged:
        """Begin to stage a revision, or go on. Its manifest must be here. Raises `KeyError` if not."""
        known = self.manifest(revision)
        if known is None:
            raise KeyError(revision)
        digest, manifest = known
        staged = Staged(self.root / "staged" / key_of(revision), manifest, digest)
        staged.settle()
        self._adopt_equal_files(staged)
        return staged

    def activate(self, staged: Staged) -> Path:
        """Put a whole revision into its place, synced; visible at once and all of it, or not at all.

        Raises `DamagedError` for weights that no engine could load.
        """
        staged.finish_files()
        check_sizes(staged.files, staged.manifest)
        check_shards(staged.files, staged.manifest)
        target = self.ready_folder(staged.manifest.revision)
        if target.exists():
            shutil.rmtree(target)
        staged.files.rename(target)
        sync_folder(target.parent)
        staged.delete()
        sync_folder(staged.folder.parent)
        return target

    def place(self, files: Path, manifest: Manifest) -> None:
        """Put a folder of whole, synced files into the place of its revision, whose manifest is kept.

        Raises `DamagedError` as `activate`.
        """
        check_sizes(files, manifest)
        check_shards(files, manifest)
        target = self.ready_folder(manifest.revision)
        seal_folder(files)
        files.rename(target)
        sync_folder(target.parent)

    def unstage_damaged(self, revision: str, damaged: Collection[str]) -> Staged:
        """Take a whole revision back, without its damaged files: those are fetched anew.

        Engines that run keep the files that they opened; nothing new starts from them.
        """
        known = self.manifest(revision)
        if known is None:
            raise KeyError(revision)
        folder = self.root / "staged" / key_of(revision)
        shutil.rmtree(folder, ignore_errors=True)
        # Marked before it is moved: a crash between the two leaves marks without files, which do not count.
        staged = Staged(folder, known[1], known[0])
        staged.mark_present(but=[index for path in damaged for index in staged.indices(path)])
        self.ready_folder(revision).rename(staged.files)
        sync_folder(self.root / "ready")
        for path in damaged:
            self._put_aside(staged.files / path, f"{key_of(revision)[:16]}-{path.replace('/', '-')}")
        return staged

    def remove(self, revision: str) -> None:
        """Delete a whole revision: out of sight first, so that a crash leaves nothing half there."""
        gone = self.root / "staged" / f"gone-{key_of(revision)}"
        shutil.rmtree(gone, ignore_errors=True)
        self.ready_folder(revision).rename(gone)
        sync_folder(self.root / "ready")
        shutil.rmtree(gone)
        self.forget(revision)

    def forget(self, revision: str) -> None:
        """Drop what is remembered of a revision that is not here any more."""
        self._manifests.pop(revision, None)
        self.facts.pop(revision, None)
        (self.root / "manifests" / key_of(revision)).unlink(missing_ok=True)
        self.save_facts()

    def sweep(self) -> None:
        """Delete what crashes left: folders of no revision, and manifests of none."""
        for entry in (self.root / "staged").iterdir():
            if entry.name.startswith("gone-"):
                shutil.rmtree(entry)
        here = {key_of(revision) for revision in (*self.ready(), *self.staged())}
        for entry in (self.root / "manifests").iterdir():
            if entry.name not in here:
                entry.unlink(missing_ok=True)

    def delete_damaged(self) -> int:
        """Delete the files that were put aside. Returns their bytes."""
        freed = 0
        for entry in (self.root / "damaged").iterdir():
            freed += entry.stat().st_size
            entry.unlink()
        return freed

    def used_bytes(self) -> int:
        """Bytes of all that lies here, each file counted once however many revisions share it."""
        seen: dict[int, int] = {}
        for name in ("ready", "staged", "imports", "damaged"):
            for parent, _, files in os.walk(self.root / name):
                for file in files:
                    with suppress(FileNotFoundError):
                        stat = Path(parent, file).lstat()
                        seen[stat.st_ino] = min(stat.st_size, stat.st_blocks * 512)
        return sum(seen.values())

    def own_bytes(self, revision: str) -> int:
        """Bytes that removing a whole revision would free: of files that no other one shares."""
        total = 0
        for parent, _, files in os.walk(self.ready_folder(revision)):
            for file in files:
                stat = Path(parent, file).lstat()
                total += stat.st_size if stat.st_nlink == 1 else 0
        return total

    # -- memory ----------------------------------------------------------------------------------
    def facts_of(self, revision: str) -> RevisionFacts:
        """What is remembered of a revision, to be changed in place and saved."""
        return self.facts.setdefault(revision, RevisionFacts())

    def save_facts(self) -> None:
        """Write down what is remembered. Losing it costs order of eviction and a check too many."""
        write_whole(self.root / "facts.json", msgspec.json.encode(self.facts))

    def _load_facts(self) -> None:
        with suppress(FileNotFoundError, msgspec.DecodeError):
            self.facts = msgspec.json.decode(
                (self.root / "facts.json").read_bytes(), type=dict[str, RevisionFacts]
            )

    def _revisions(self, name: str) -> list[str]:
        return sorted(
            f"sha256:{entry.name}"
            for entry in (self.root / name).iterdir()
            if len(entry.name) == _HEX and entry.is_dir()
        )

    def _adopt_equal_files(self, staged: Staged) -> None:
        """Link files that a whole revision has already, piece for piece: they need neither room nor time."""
        wanted = {(f.sha256, f.size_bytes, f.pieces): f.path for f in staged.manifest.files if f.pieces}
        for revision in self.ready():
            known = self.manifest(revision)
            if known is None or known[1].piece_bytes != staged.manifest.piece_bytes:
                continue
            for file in known[1].files:
                path = wanted.get((file.sha256, file.size_bytes, file.pieces))
                if path is not None:
                    staged.adopt(path, self.ready_folder(revision) / file.path)

    def _put_aside(self, path: Path, name: str) -> None:
        with suppress(FileNotFoundError):
            path.rename(self.root / "damaged" / name[-200:])


def key_of(revision: str) -> str:
    """Name of a revision's folder. Raises `ValueError` for what is no digest of a model."""
    key = revision.removeprefix("sha256:")
    if len(key) != _HEX or key.strip("0123456789abcdef"):
        raise ValueError(f"{revision[:80]!r} is no digest of a model")
    return key


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file at once: a crash leaves the old one or the new one."""
    beside = path.with_name(path.name + ".new")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    beside.rename(path)
    sync_folder(path.parent)
