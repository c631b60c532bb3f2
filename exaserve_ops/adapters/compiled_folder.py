"""Reads a folder of what an engine compiled: files with their digests, and the manifest that names them."""

from __future__ import annotations

from pathlib import Path

from exaserve_ops.adapters.model_folder import manifest_of, names_in
from exaserve_ops.adapters.model_hashing import hash_files
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.compiled import MOST_BYTES, MOST_FILES, CompiledFacts
from exaserve_ops.serving.domain.manifest import FileEntry, revision_of


class CompiledFolder:
    """Implements the port of pages and REST. A request waits for it: there is a bound of bytes."""

    def read(self, folder: str) -> CompiledFacts:
        """Read a folder on this machine. Raises `InvalidInputError` naming what is wrong with it."""
        path = Path(folder)
        if not path.is_absolute() or not path.is_dir():
            raise InvalidInputError("folder", f"'{folder}' is no absolute path of a folder here")
        names = names_in(path)
        if not names:
            raise InvalidInputError("folder", f"'{folder}' holds no file")
        try:
            total = sum((path / name).stat().st_size for name in names)
            if len(names) > MOST_FILES or total > MOST_BYTES:
                told = (
                    f"{len(names):,} files of {total:,} bytes; {MOST_FILES:,} and {MOST_BYTES:,} are allowed"
                )
                raise InvalidInputError("folder", f"'{folder}' holds {told}")
            hashed = hash_files(path, names, lambda _bytes: None)
        except OSError as error:
            told = f"{error.filename or folder}: {error.strerror}"
            raise InvalidInputError("folder", told) from error
        return CompiledFacts(
            source=path.as_uri(),
            revision=revision_of(FileEntry(file.path, file.size_bytes, file.sha256) for file in hashed),
            total_bytes=sum(file.size_bytes for file in hashed),
            file_count=len(hashed),
            manifest=manifest_of(hashed),
        )
