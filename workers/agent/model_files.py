"""Verifying a model's files against the wish, before anything is launched from them."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import unquote, urlsplit

from workers.agent.journal import Journal
from workers.agent.supervisor import ModelCheck
from workers.protocol.wish import ModelFile, ModelRef
from workers.weights.keeper import Verdict

_CHUNK_BYTES = 4 * 1024 * 1024

logger = logging.getLogger(__name__)


class ModelMismatchError(Exception):
    """The files on this node are not the model that is wanted; the text names the file."""


def model_folder(source: str) -> Path:
    """Folder behind a `file://` source. Raises `ModelMismatchError` for any other source."""
    parts = urlsplit(source)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ModelMismatchError(f"model source {source!r} is not file:///folder")
    return Path(unquote(parts.path))


def verify_model(model: ModelRef, journal: Journal) -> None:
    """Check every file's size and SHA-256. Raises `ModelMismatchError` for the first that differs.

    Digests are remembered with the file's size, mtime and inode, so an unchanged file is read once.
    """
    folder = model_folder(model.source)
    if not folder.is_dir():
        raise ModelMismatchError(f"model folder {folder} does not exist on this node")
    for file in model.files:
        _verify_file(folder, file, journal)


def _verify_file(folder: Path, file: ModelFile, journal: Journal) -> None:
    relative = PurePosixPath(file.path)
    if relative.is_absolute() or ".." in relative.parts:
        raise ModelMismatchError(f"model file {file.path!r} leaves the model folder")
    path = folder / relative
    try:
        stat = path.stat()
        if stat.st_size != file.size_bytes:
            raise ModelMismatchError(
                f"model file {file.path} has {stat.st_size} bytes, not {file.size_bytes}"
            )
        fingerprint = _fingerprint(stat)
        digest = journal.find_digest(str(path), fingerprint)
        if digest is None:
            digest = _sha256(path)
            journal.save_digests([(str(path), fingerprint, digest)])
    except OSError as error:
        raise ModelMismatchError(f"model file {file.path}: {error.strerror}") from error
    if digest != file.sha256.lower():
        raise ModelMismatchError(
            f"model file {file.path} has SHA-256 {digest[:12]}…, not {file.sha256[:12]}…"
        )


def _fingerprint(stat: os.stat_result) -> str:
    return f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"


def describe_files(model: ModelRef) -> tuple[str, ...]:
    """Return what the model's files look like from outside: another answer, perhaps other content."""
    return tuple(_describe(model.source, file) for file in model.files)


def _describe(source: str, file: ModelFile) -> str:
    try:
        return _fingerprint((model_folder(source) / file.path).stat())
    except (OSError, ModelMismatchError) as error:
        return str(error)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class StoredWeights(Protocol):
    """The node's own copies of weights, verified when they came."""

    def verdict(self, revision: str, /) -> Verdict:
        """Whether a replica can start from a revision now, and if not, why not."""
        ...


class ModelVerifier:
    """Says whether a model's files are what they should be, and where they are.

    Files in place are read in the background, since that takes minutes, one model at a time. Those of the
    node's own store were verified while they came.
    """

    def __init__(
        self,
        journal: Journal,
        on_verdict: Callable[[], None] = lambda: None,
        stored: StoredWeights | None = None,
    ) -> None:
        self._journal = journal
        self._stored = stored
        self._on_verdict = on_verdict
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._verdicts: dict[tuple[str, str, int], _Verdict] = {}

    def verdict(self, model: ModelRef, generation: int) -> tuple[ModelCheck, str]:
        """Return the state of the check, and the reason where it went wrong.

        A verdict holds for the files that were read: once one of them looks different, whether it was
        mended or damaged, there is none. Weights of the store are waited for, and say how far they are.
        """
        if model.manifest_digest:
            return self._verdict_of_stored(model)
        key = _key(model, generation)
        with self._lock:
            known = self._verdicts.get(key)
        if known is None:
            return (ModelCheck.UNKNOWN, "")
        if known.check is not ModelCheck.RUNNING and known.files != describe_files(model):
            with self._lock:
                self._verdicts.pop(key, None)
            return (ModelCheck.UNKNOWN, "")
        return (known.check, known.reason)

    def _verdict_of_stored(self, model: ModelRef) -> tuple[ModelCheck, str]:
        if self._stored is None:
            return (ModelCheck.BAD, "this agent keeps no weights on its disk")
        verdict = self._stored.verdict(model.digest)
        if verdict.folder is not None:
            return (ModelCheck.GOOD, "")
        return (ModelCheck.BAD if verdict.hopeless else ModelCheck.RUNNING, verdict.reason)

    def folder(self, model: ModelRef) -> Path:
        """Where a verified model's files are. Raises `ModelMismatchError` where they are gone since."""
        if not model.manifest_digest:
            return model_folder(model.source)
        folder = self._stored.verdict(model.digest).folder if self._stored is not None else None
        if folder is None:
            raise ModelMismatchError(f"weights of {model.name} are not on this node any more")
        return folder

    def start(self, model: ModelRef, generation: int) -> None:
        """Begin the check unless it has begun; a new generation of the wish checks again."""
        key = _key(model, generation)
        with self._lock:
            if key in self._verdicts:
                return
            self._verdicts[key] = _Verdict(
                ModelCheck.RUNNING, f"verifying {len(model.files)} model files", ()
            )
        threading.Thread(target=self._check, args=(model, key), name="verify-model", daemon=True).start()

    def _check(self, model: ModelRef, key: tuple[str, str, int]) -> None:
        # Described before they are read: a change from then on makes the verdict void.
        files = describe_files(model)
        try:
            with self._reading:
                verify_model(model, self._journal)
            verdict = _Verdict(ModelCheck.GOOD, "", files)
        except ModelMismatchError as error:
            verdict = _Verdict(ModelCheck.BAD, str(error), files)
        except Exception as error:  # top of a thread: the verdict must not stay open
            logger.exception("verifying model %s failed", model.name)
            reason = f"could not verify the model: {type(error).__name__}"
            verdict = _Verdict(ModelCheck.BAD, reason, files)
        with self._lock:
            self._verdicts[key] = verdict
        self._on_verdict()


@dataclass(frozen=True, slots=True)
class _Verdict:
    check: ModelCheck
    reason: str
    files: tuple[str, ...]
    """What the files looked like when they were read."""


def _key(model: ModelRef, generation: int) -> tuple[str, str, int]:
    return (model.source, model.digest, generation)
