"""Whether files of weights are what their manifest says, and what an engine can load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from workers.protocol.manifest import Manifest, ManifestFile, piece_span
from workers.protocol.shards import (
    INDEX_SUFFIX,
    MAX_INDEX_BYTES,
    SUFFIX,
    ShardError,
    check_index,
    count_elements,
    read_header,
)
from workers.weights.disk_io import DiskFile


class DamagedError(Exception):
    """Files that are not what they should be; the text names the file and both sizes."""


def bad_pieces(
    folder: Path, file: ManifestFile, piece_bytes: int, pace: Callable[[int], object] = lambda _bytes: None
) -> list[int]:
    """Read a file from its disk and return those of its pieces that are not what the manifest says.

    `pace` is told the bytes before each piece is read, and may take its time. Raises `OSError`.
    """
    found = []
    with DiskFile(folder / file.path, piece_bytes) as disk:
        for index in range(file.piece_count):
            offset, length = piece_span(file, index, piece_bytes)
            pace(length)
            data = disk.read(offset, length)
            if len(data) != length or blake3(data).digest() != file.piece_digest(index):
                found.append(index)
    return found


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there, in its size, and is a file. Raises `DamagedError`."""
    for file in manifest.files:
        path = folder / file.path
        try:
            stat = path.lstat()
        except OSError as error:
            raise DamagedError(
                f"{file.path} ({file.size_bytes:,} bytes) is missing: {error.strerror}"
            ) from error
        if stat.st_size != file.size_bytes or not path.is_file() or path.is_symlink():
            raise DamagedError(f"{file.path} has {stat.st_size:,} bytes, not {file.size_bytes:,}")


def check_shards(folder: Path, manifest: Manifest) -> None:
    """Check headers and indexes of safetensors, of which nothing else is read. Raises `DamagedError`."""
    paths = {file.path for file in manifest.files}
    try:
        for file in manifest.files:
            if file.path.endswith(SUFFIX):
                _check_header(folder, file)
            elif file.path.endswith(INDEX_SUFFIX):
                check_index(file.path, _read_index(folder, file), paths)
    except ShardError as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        raise DamagedError(f"{error.filename or folder}: {error.strerror}") from error


def count_parameters(folder: Path, manifest: Manifest) -> int:
    """Elements of the tensors of all shards. Raises `DamagedError`."""
    try:
        return sum(
            count_elements(file.path, _check_header(folder, file))
            for file in manifest.files
            if file.path.endswith(SUFFIX)
        )
    except ShardError as error:
        raise DamagedError(str(error)) from error


def shards_of_index(folder: Path, manifest: Manifest, path: str) -> tuple[str, ...]:
    """Files that an index names; none where it is not there. Raises `DamagedError`."""
    paths = {file.path: file for file in manifest.files}
    if path not in paths:
        return ()
    try:
        return tuple(check_index(path, _read_index(folder, paths[path]), paths))
    except ShardError as error:
        raise DamagedError(str(error)) from error


def _check_header(folder: Path, file: ManifestFile) -> dict[str, Any]:
    with _opened(folder / file.path) as fd:
        return read_header(file.path, os.fstat(fd).st_size, lambda offset, length: _read(fd, offset, length))


def _read_index(folder: Path, file: ManifestFile) -> object:
    if file.size_bytes > MAX_INDEX_BYTES:
        raise ShardError(f"{file.path} has {file.size_bytes:,} bytes; {MAX_INDEX_BYTES:,} are allowed")
    try:
        return json.loads((folder / file.path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{file.path} is no JSON: {error}") from error


def _read(fd: int, offset: int, length: int) -> bytes:
    """Read so many bytes; fewer only at the end of the file."""
    parts = []
    while length and (part := os.pread(fd, length, offset)):
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return b"".join(parts)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
