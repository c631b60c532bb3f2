"""Reads a model's folder: files with their digests, and what config.json says."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exaserve_ops.adapters.folder_places import files_below, find_folder, refuse_private, unreadable
from exaserve_ops.adapters.model_hashing import hash_files
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.lib.json_text import read_json
from exaserve_ops.serving.domain.architecture import UnknownArchitectureError, read_architecture
from exaserve_ops.serving.domain.manifest import EncodedManifest, FileEntry
from exaserve_ops.serving.domain.weights_size import UnknownWeights, weights_of_files
from exaserve_ops.serving.services.models import ModelFacts
from workers.protocol import manifest as manifests
from workers.protocol.shards import (
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    SUFFIX,
    ShardError,
    count_elements,
    read_header,
)

_INDEX = "model.safetensors.index.json"
_HUB_SNAPSHOTS = "snapshots"
_HUB_BLOBS = "blobs"
"""A hub's cache has links in `snapshots/<revision>` to the files in `blobs`."""


def _nobody_listens(read_bytes: int) -> None:
    """Take no notice of progress."""


class ModelFolder:
    """Implements the pages' and the API's port of the same shape.

    `private`: folders of the product itself, of which nothing is read.
    """

    def __init__(self, *, private: Sequence[Path] = ()) -> None:
        self._private = tuple(private)

    def read(self, folder: str, progress: Callable[[int], None] = _nobody_listens) -> ModelFacts:
        """Read a folder on this machine. Raises `InvalidInputError` naming what is wrong with it.

        `progress` is told of each piece that was hashed, in bytes.
        """
        path = self.place(folder)
        try:
            return self._read(path, progress)
        except OSError as error:
            raise unreadable(error, folder) from error

    def place(self, folder: str) -> Path:
        """Where a folder that may be a model's lies. Raises `InvalidInputError`; lists nothing."""
        refuse_private(folder, self._private)
        path = Path(folder)
        try:
            found = stat.S_ISREG((path / "config.json").stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            found = False
        except OSError as error:
            raise unreadable(error, folder) from error
        if not found:
            raise InvalidInputError("folder", f"'{folder}' holds no config.json")
        _check_link(find_folder(folder), path / "config.json")
        return path

    def _read(self, path: Path, progress: Callable[[int], None]) -> ModelFacts:
        config = _json_file(path / "config.json", MAX_CONFIG_BYTES)
        try:
            architecture = read_architecture(config)
        except UnknownArchitectureError as error:
            raise InvalidInputError("folder", f"config.json: {error}") from error
        names = names_in(path)
        weights = [name for name in names if name.endswith(SUFFIX)]
        if not weights:
            raise InvalidInputError("folder", f"'{path}' holds no {SUFFIX} file")
        if "tokenizer.json" not in names:
            raise InvalidInputError("folder", f"'{path}' holds no tokenizer.json")
        # Before anything is hashed: what is broken at its publisher is found in a moment.
        parameter_count = sum(_parameters(path, name) for name in weights)
        hashed = hash_files(path, names, progress)
        files = tuple(FileEntry(file.path, file.size_bytes, file.sha256) for file in hashed)
        index = _json_file(path / _INDEX, MAX_INDEX_BYTES) if _INDEX in names else None
        size = weights_of_files(files, index)
        if isinstance(size, UnknownWeights):
            raise InvalidInputError("folder", f"the size of its weights is not known: {size.reason}")
        return ModelFacts(
            source=path.as_uri(),
            files=files,
            architecture=architecture,
            parameter_count=parameter_count,
            config=config,
            weights_bytes=size.bytes,
            manifest=manifest_of(hashed),
        )


def names_in(folder: Path, *, hub_cache: bool = True) -> list[str]:
    """Files of a folder, by their safe paths. Links are followed where they stay in it.

    `hub_cache`: and where a hub's cache has them. Raises `InvalidInputError`.
    """
    home = find_folder(str(folder))
    names = []
    for file in files_below(folder):
        _check_link(home, file, hub_cache=hub_cache)
        names.append(file.relative_to(folder).as_posix())
    names.sort()
    try:
        manifests.check_paths(names)
    except manifests.ManifestError as error:
        raise InvalidInputError("folder", str(error)) from error
    return names


def _check_link(home: Path, file: Path, *, hub_cache: bool = True) -> None:
    if not file.is_symlink():
        return
    target = file.resolve()
    if target.is_relative_to(home):
        if any(part.startswith(".") for part in target.relative_to(home).parts):
            raise InvalidInputError("folder", f"'{file.name}' is a link to a hidden file")
        return
    in_hub_cache = home.parent.name == _HUB_SNAPSHOTS and target.is_relative_to(home.parents[1] / _HUB_BLOBS)
    if not (hub_cache and in_hub_cache):
        raise InvalidInputError("folder", f"'{file.name}' is a link that leads out of the folder")


def manifest_of(files: tuple[manifests.ManifestFile, ...]) -> EncodedManifest:
    """What nodes fetch these files by. Raises `InvalidInputError`."""
    manifest = manifests.Manifest(manifests.revision_of(files), manifests.PIECE_BYTES, files)
    try:
        digest, body = manifests.encode(manifest)
    except manifests.ManifestError as error:
        raise InvalidInputError("folder", str(error)) from error
    return EncodedManifest(digest, body)


def _json_file(path: Path, most_bytes: int) -> dict[str, Any]:
    """An object that a database can hold: numbers without end become text, null characters are refused."""
    try:
        if path.stat().st_size > most_bytes:
            raise InvalidInputError("folder", f"{path.name} is larger than {most_bytes:,} bytes")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise InvalidInputError("folder", f"'{path.parent}' holds no {path.name}") from error
    return json_object(data, path.name)


def json_object(data: bytes, name: str) -> dict[str, Any]:
    """Read a file that must be an object. Raises `InvalidInputError`, naming it."""
    try:
        text = data.decode("utf-8")
        value = read_json(text)
    except ValueError as error:
        raise InvalidInputError("folder", f"{name}: {error}") from error
    if not isinstance(value, dict) or "\\u0000" in text or "\0" in text:
        raise InvalidInputError("folder", f"{name} is no JSON object, or holds null characters")
    return value


def _parameters(folder: Path, name: str) -> int:
    """Elements of all tensors, from the header alone."""
    with (folder / name).open("rb") as stream:

        def read_at(offset: int, length: int) -> bytes:
            stream.seek(offset)
            return stream.read(length)

        try:
            return count_elements(name, read_header(name, os.fstat(stream.fileno()).st_size, read_at))
        except ShardError as error:
            raise InvalidInputError("folder", str(error)) from error
