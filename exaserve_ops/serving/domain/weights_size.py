"""How many bytes a model's weights are: from its files, never from its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exaserve_ops.serving.domain.manifest import FileEntry

_SAFETENSORS = ".safetensors"
_OTHER_FORMATS = (".gguf", ".bin", ".pt", ".pth")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state")
_DOUBLES = ("consolidated", "adapter_model")
"""Files that hold the same weights in another layout, or weights to be added to others."""


@dataclass(frozen=True, slots=True)
class WeightsSize:
    """Size of the weights, and where it was read."""

    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class UnknownWeights:
    """The size is not known: nothing may be placed by it."""

    reason: str


def weights_of_files(
    files: Iterable[FileEntry], index: Mapping[str, Any] | None = None
) -> WeightsSize | UnknownWeights:
    """Sum of the sizes of the weight files: those that the index lists, where there is one.

    Quantised weights count as they are stored. A shard that the index lists and that is not there makes
    the size unknown.
    """
    sizes = {file.path: file.size_bytes for file in files}
    if index is not None:
        return _of_index(sizes, index)
    chosen = _chosen(sizes)
    total = sum(sizes[path] for path in chosen)
    if total <= 0:
        return UnknownWeights("there is no file of weights (.safetensors, .gguf, .bin)")
    return WeightsSize(total, f"sum of {len(chosen)} files")


def weights_of_index(index: Mapping[str, Any]) -> WeightsSize | UnknownWeights:
    """Size by the metadata of `model.safetensors.index.json` alone."""
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        return UnknownWeights("the index has no usable metadata.total_size")
    return WeightsSize(size, "total_size of the index")


def weights_of_header(header: Mapping[str, Any]) -> WeightsSize | UnknownWeights:
    """Size by the header of one safetensors file: where its last tensor ends."""
    ends = [
        tensor["data_offsets"][1]
        for name, tensor in header.items()
        if name != "__metadata__" and isinstance(tensor, Mapping) and "data_offsets" in tensor
    ]
    if not ends:
        return UnknownWeights("the header names no tensor")
    return WeightsSize(max(ends), f"header of {len(ends)} tensors")


def _of_index(sizes: Mapping[str, int], index: Mapping[str, Any]) -> WeightsSize | UnknownWeights:
    shards = index.get("weight_map")
    if not isinstance(shards, Mapping) or not shards:
        return UnknownWeights("the index has no weight_map")
    names = sorted(set(map(str, shards.values())))
    missing = [name for name in names if name not in sizes]
    if missing:
        return UnknownWeights(f"{len(missing)} of {len(names)} shards are not there, first {missing[0]}")
    total = sum(sizes[name] for name in names)
    if total <= 0:
        return UnknownWeights("all shards are empty")
    return WeightsSize(total, f"sum of {len(names)} shards")


def _chosen(sizes: Mapping[str, int]) -> list[str]:
    """Files of one format in one folder, without doubles."""
    for suffixes in ((_SAFETENSORS,), _OTHER_FORMATS):
        found = [p for p in sizes if p.endswith(suffixes) and not _base(p).startswith(_NOT_WEIGHTS)]
        # Models keep their weights at the top; parts of a pipeline keep them in folders.
        found = [p for p in found if "/" not in p] or found
        single = [p for p in found if not _base(p).startswith(_DOUBLES)]
        if found:
            return single or found
    return []


def _base(path: str) -> str:
    return path.rpartition("/")[2]
