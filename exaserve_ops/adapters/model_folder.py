"""Reads a model as hubs lay it out: config.json, safetensors, tokenizer.json in one folder."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.architecture import UnknownArchitectureError, read_architecture
from exaserve_ops.serving.domain.manifest import FileEntry
from exaserve_ops.serving.services.models import ModelFacts

_CHUNK_BYTES = 1024 * 1024
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The bound that the safetensors format itself sets."""


def read_model_folder(folder: Path) -> ModelFacts:
    """Hash every file and read what config.json and the weights' headers say.

    Raises `InvalidInputError` for a folder that holds no model of a known kind.
    """
    folder = folder.absolute()
    try:
        architecture = read_architecture(json.loads((folder / "config.json").read_text()))
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path, folder))
        files = tuple(_file_entry(path, folder) for path in paths)
        parameters = sum(_parameter_count(path) for path in paths if path.suffix == ".safetensors")
    except OSError as error:
        raise InvalidInputError("source", f"cannot read {error.filename}: {error.strerror}") from error
    except (UnknownArchitectureError, ValueError) as error:
        raise InvalidInputError("source", f"{folder} holds no model that can be served: {error}") from error
    if parameters == 0:
        raise InvalidInputError("source", f"{folder} holds no safetensors weights")
    return ModelFacts(
        source=folder.as_uri(), files=files, architecture=architecture, parameter_count=parameters
    )


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _file_entry(path: Path, folder: Path) -> FileEntry:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, digest.hexdigest())


def _parameter_count(path: Path) -> int:
    """Sum of the tensors' sizes in the header, which is JSON behind an 8-byte length."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is no safetensors file")
        header = json.loads(file.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
