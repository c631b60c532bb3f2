"""Reads a model's folder: files with their digests, and what config.json says."""

from __future__ import annotations

import hashlib
import json
import struct
from math import prod
from pathlib import Path

from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.architecture import (
    Architecture,
    UnknownArchitectureError,
    read_architecture,
)
from exaserve_ops.serving.domain.manifest import FileEntry
from exaserve_ops.serving.services.models import ModelFacts

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Bound of a safetensors header; the format's own implementation has the same."""
_CHUNK_BYTES = 4 * 1024 * 1024


class ModelFolder:
    """Implements the pages' and the API's port of the same shape."""

    def read(self, folder: str) -> ModelFacts:
        """Read a folder on this machine. Raises `InvalidInputError` naming what is wrong with it."""
        path = Path(folder)
        if not path.is_absolute() or not path.is_dir():
            raise InvalidInputError("folder", f"'{folder}' is no absolute path of a folder here")
        architecture = _architecture(path)
        names = sorted(
            file.relative_to(path).as_posix()
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        weights = [name for name in names if name.endswith(".safetensors")]
        if not weights:
            raise InvalidInputError("folder", f"'{folder}' holds no .safetensors file")
        if "tokenizer.json" not in names:
            raise InvalidInputError("folder", f"'{folder}' holds no tokenizer.json")
        return ModelFacts(
            source=path.as_uri(),
            files=tuple(_entry(path, name) for name in names),
            architecture=architecture,
            parameter_count=sum(_parameters(path / name) for name in weights),
        )


def _architecture(path: Path) -> Architecture:
    try:
        return read_architecture(json.loads((path / "config.json").read_text()))
    except FileNotFoundError as error:
        raise InvalidInputError("folder", f"'{path}' holds no config.json") from error
    except (ValueError, UnknownArchitectureError) as error:
        raise InvalidInputError("folder", f"config.json: {error}") from error


def _entry(path: Path, name: str) -> FileEntry:
    digest = hashlib.sha256()
    with (path / name).open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return FileEntry(name, file.tell(), digest.hexdigest())


def _parameters(file: Path) -> int:
    """Elements of all tensors, from the header alone."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == len(b"8 bytes.") else 0
        if not 0 < length <= MAX_HEADER_BYTES:
            raise InvalidInputError("folder", f"'{file.name}' has no safetensors header")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise InvalidInputError("folder", f"'{file.name}': broken header: {error}") from error
    return sum(prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
