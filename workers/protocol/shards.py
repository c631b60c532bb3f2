"""What a safetensors file must look like, so that none is passed on or launched that engines choke on.

Pure: the caller reads. A file is 8 bytes with the length of the header, the header (JSON: each tensor with
where its bytes begin and end), and the tensors' bytes, which cover the rest without gap or overlap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Bound of a header; the format's own implementation has the same."""
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""Bound of config.json; the largest ones list the layers of a quantised model."""

_LENGTH_BYTES = 8

ReadAt = Callable[[int, int], bytes]
"""Reads (offset, length in bytes); shorter only at the end of the file."""


class ShardError(ValueError):
    """A file of weights that is not what its header says; the text names it and both sizes."""


def read_header(path: str, size_bytes: int, read_at: ReadAt) -> dict[str, Any]:
    """Return a shard's header. Raises `ShardError` unless it describes the file to the last byte."""
    prefix = read_at(0, _LENGTH_BYTES)
    if size_bytes < _LENGTH_BYTES or len(prefix) < _LENGTH_BYTES:
        raise ShardError(f"{path} has {size_bytes:,} bytes, and the length of its header alone takes 8")
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= MAX_HEADER_BYTES:
        raise ShardError(
            f"{path} has {size_bytes:,} bytes and claims a header of {length:,}; "
            f"1 to {MAX_HEADER_BYTES:,} are allowed"
        )
    if _LENGTH_BYTES + length > size_bytes:
        raise ShardError(f"{path} has {size_bytes:,} bytes and ends inside its header of {length:,}")
    header = _parse(path, read_at(_LENGTH_BYTES, length))
    described = _LENGTH_BYTES + length + _covered_bytes(path, header)
    if described != size_bytes:
        raise ShardError(f"{path} has {size_bytes:,} bytes, and its header describes {described:,}")
    return header


def check_index(path: str, index: object, paths: Collection[str]) -> list[str]:
    """Return the shards that an index names. Raises `ShardError` naming the first that is not there."""
    shards = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(shards, Mapping) or not shards:
        raise ShardError(f"{path} has no weight_map")
    folder = path.rpartition("/")[0]
    names = sorted({str(name) for name in shards.values()})
    missing = [name for name in names if (f"{folder}/{name}" if folder else name) not in paths]
    if missing:
        raise ShardError(f"{path} names {len(names)} shards, and {missing[0]} is not there")
    return names


def count_elements(path: str, header: Mapping[str, Any]) -> int:
    """Elements of all tensors of a shard: parameters, where none is packed. Raises `ShardError`."""
    try:
        return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (KeyError, TypeError) as error:
        raise ShardError(f"{path} has a tensor without a shape in its header") from error


def _parse(path: str, data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{path} has a broken header: {error}") from error
    if not isinstance(header, dict):
        raise ShardError(f"{path} has a header that is no JSON object")
    return header


def _covered_bytes(path: str, header: Mapping[str, Any]) -> int:
    """Bytes of all tensors, which follow one another."""
    spans = sorted(_span(path, name, tensor) for name, tensor in header.items() if name != "__metadata__")
    end = 0
    for begin, stop, name in spans:
        if begin != end:
            raise ShardError(f"{path}: the bytes of {name[:120]!r} begin at {begin:,}, not at {end:,}")
        end = stop
    return end


def _span(path: str, name: str, tensor: object) -> tuple[int, int, str]:
    offsets = tensor.get("data_offsets") if isinstance(tensor, Mapping) else None
    if not (
        isinstance(offsets, list)
        and len(offsets) == len(("begin", "end"))
        and all(type(offset) is int for offset in offsets)
        and 0 <= offsets[0] <= offsets[1]
    ):
        raise ShardError(f"{path}: {name[:120]!r} does not say where its bytes are")
    return (offsets[0], offsets[1], name)
