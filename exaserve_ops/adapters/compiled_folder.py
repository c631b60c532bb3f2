"""Reads a folder of what an engine compiled: files with their digests, and the manifest that names them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from exaserve_ops.adapters.folder_places import find_folder, refuse_private, unreadable
from exaserve_ops.adapters.model_folder import manifest_of, names_in
from exaserve_ops.adapters.model_hashing import hash_files
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.compiled import MOST_BYTES, MOST_FILES, CompiledFacts
from exaserve_ops.serving.domain.manifest import FileEntry, revision_of

SETTING = "EXAOPS_COMPILED_FOLDERS"


class CompiledFolder:
    """Implements the port of pages and REST. A request waits for it: there is a bound of bytes.

    Any folder would do by its look, unlike a model's, so only those below `allowed` are read: whoever runs
    the control plane names them, and nothing else of that machine goes to nodes.
    """

    def __init__(self, allowed: Sequence[Path], *, private: Sequence[Path] = ()) -> None:
        self._allowed = tuple(allowed)
        self._private = tuple(private)

    def read(self, folder: str) -> CompiledFacts:
        """Read a folder on this machine. Raises `InvalidInputError` naming what is wrong with it."""
        path = self._place(folder)
        names = names_in(path, hub_cache=False)
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
            raise unreadable(error, folder) from error
        return CompiledFacts(
            source=Path(folder).as_uri(),
            revision=revision_of(FileEntry(file.path, file.size_bytes, file.sha256) for file in hashed),
            total_bytes=sum(file.size_bytes for file in hashed),
            file_count=len(hashed),
            manifest=manifest_of(hashed),
        )

    def _place(self, folder: str) -> Path:
        if not self._allowed:
            raise InvalidInputError(
                "folder",
                f"this installation names no folder that compiled files may come from: set {SETTING} where "
                "the control plane runs, and put them below",
            )
        real = find_folder(folder)
        for allowed in self._allowed:
            below = Path(os.path.relpath(real, os.path.realpath(allowed))).parts
            if below and not any(part.startswith(".") for part in below):
                refuse_private(folder, self._private)
                return real
        named = ", ".join(str(one) for one in self._allowed)
        raise InvalidInputError(
            "folder", f"'{folder}' is no plain folder below {named}, which {SETTING} allows: copy it there"
        )
