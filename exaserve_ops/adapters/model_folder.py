"""Reads a model's folder: files with their digests, and what config.json says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    """Implements the pages' and the API's port of the same shape."""

    def read(self, folder: str, progress: Callable[[int], None] = _nobody_listens) -> ModelFacts:
        """Read a folder on this machine. Raises `InvalidInputError` naming what is wrong with it.

        `progress` is told of each piece that was hashed, in bytes.
        """
        path = Path(folder)
        if not path.is_absolute() or not path.is_dir():
            raise InvalidInputError("folder", f"'{folder}' is no absolute path of a folder here")
        config = _json_file(path / "config.json", MAX_CONFIG_BYTES)
        try:
            architecture = read_architecture(config)
        except UnknownArchitectureError as error:
            raise InvalidInputError("folder", f"config.json: {error}") from error
        names = names_in(path)
        weights = [name for name in names if name.endswith(SUFFIX)]
        if not weights:
            raise InvalidInputError("folder", f"'{folder}' holds no {SUFFIX} file")
        if "tokenizer.json" not in names:
            raise InvalidInputError("folder", f"'{folder}' holds no tokenizer.json")
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


def names_in(folder: Path) -> list[str]:
    """Files of a folder, by their safe paths. Links are followed only where a hub's cache has them.

    Raises `InvalidInputError`.
    """
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        linked = [name for name in folders if Path(parent, name).is_symlink()]
        if linked:
            raise InvalidInputError("folder", f"'{Path(parent, linked[0])}' is a link to a folder")
        for name in files:
            file = Path(parent, name)
            if not name.startswith(".") and file.is_file():
                _check_link(folder, file)
                names.append(file.relative_to(folder).as_posix())
    names.sort()
    try:
        manifests.check_paths(names)
    except manifests.ManifestError as error:
        raise InvalidInputError("folder", str(error)) from error
    return names


def _check_link(folder: Path, file: Path) -> None:
    if not file.is_symlink():
        return
    target, home = file.resolve(), folder.resolve()
    in_hub_cache = home.parent.name == _HUB_SNAPSHOTS and target.is_relative_to(home.parents[1] / _HUB_BLOBS)
    if not target.is_relative_to(home) and not in_hub_cache:
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
