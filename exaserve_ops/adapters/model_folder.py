"""Reads a model's folder: files with their digests, and what config.json says."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.lib.json_text import read_json
from exaserve_ops.serving.domain.architecture import UnknownArchitectureError, read_architecture
from exaserve_ops.serving.domain.manifest import FileEntry
from exaserve_ops.serving.domain.weights_size import UnknownWeights, weights_of_files
from exaserve_ops.serving.services.models import ModelFacts

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Bound of a safetensors header; the format's own implementation has the same."""
MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""Bound of config.json; the largest ones list the layers of a quantised model."""
MAX_INDEX_BYTES = 64 * 1024 * 1024
_INDEX = "model.safetensors.index.json"
_CHUNK_BYTES = 4 * 1024 * 1024


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
        files = tuple(_entry(path, name, progress) for name in names)
        index = _json_file(path / _INDEX, MAX_INDEX_BYTES) if _INDEX in names else None
        size = weights_of_files(files, index)
        if isinstance(size, UnknownWeights):
            raise InvalidInputError("folder", f"the size of its weights is not known: {size.reason}")
        return ModelFacts(
            source=path.as_uri(),
            files=files,
            architecture=architecture,
            parameter_count=sum(_parameters(path / name) for name in weights),
            config=config,
            weights_bytes=size.bytes,
        )


def _json_file(path: Path, most_bytes: int) -> dict[str, Any]:
    """An object that a database can hold: numbers without end become text, null characters are refused."""
    try:
        if path.stat().st_size > most_bytes:
            raise InvalidInputError("folder", f"{path.name} is larger than {most_bytes:,} bytes")
        text = path.read_text("utf-8")
        value = read_json(text)
    except FileNotFoundError as error:
        raise InvalidInputError("folder", f"'{path.parent}' holds no {path.name}") from error
    except ValueError as error:
        raise InvalidInputError("folder", f"{path.name}: {error}") from error
    if not isinstance(value, dict) or "\\u0000" in text or "\0" in text:
        raise InvalidInputError("folder", f"{path.name} is no JSON object, or holds null characters")
    return value


def _entry(path: Path, name: str, progress: Callable[[int], None]) -> FileEntry:
    digest = hashlib.sha256()
    with (path / name).open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
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
