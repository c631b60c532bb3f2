"""Verifying a model's files against the wish, before anything is launched from them."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from workers.agent.journal import Journal
from workers.agent.supervisor import ModelCheck
from workers.protocol.v1 import ModelFile, ModelRef

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
        fingerprint = f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
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


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class ModelVerifier:
    """Verifies in the background, since reading weights takes minutes, one model at a time."""

    def __init__(self, journal: Journal, on_verdict: Callable[[], None] = lambda: None) -> None:
        self._journal = journal
        self._on_verdict = on_verdict
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._verdicts: dict[tuple[str, str, int], tuple[ModelCheck, str]] = {}

    def verdict(self, model: ModelRef, generation: int) -> tuple[ModelCheck, str]:
        """Return the state of the check, and the reason where it went wrong."""
        with self._lock:
            return self._verdicts.get(_key(model, generation), (ModelCheck.UNKNOWN, ""))

    def start(self, model: ModelRef, generation: int) -> None:
        """Begin the check unless it has begun; a new generation of the wish checks again."""
        key = _key(model, generation)
        with self._lock:
            if key in self._verdicts:
                return
            self._verdicts[key] = (ModelCheck.RUNNING, f"verifying {len(model.files)} model files")
        threading.Thread(target=self._check, args=(model, key), name="verify-model", daemon=True).start()

    def _check(self, model: ModelRef, key: tuple[str, str, int]) -> None:
        verdict: tuple[ModelCheck, str]
        try:
            with self._reading:
                verify_model(model, self._journal)
            verdict = (ModelCheck.GOOD, "")
        except ModelMismatchError as error:
            verdict = (ModelCheck.BAD, str(error))
        except Exception as error:  # top of a thread: the verdict must not stay open
            logger.exception("verifying model %s failed", model.name)
            verdict = (ModelCheck.BAD, f"could not verify the model: {type(error).__name__}")
        with self._lock:
            self._verdicts[key] = verdict
        self._on_verdict()


def _key(model: ModelRef, generation: int) -> tuple[str, str, int]:
    return (model.source, model.digest, generation)
