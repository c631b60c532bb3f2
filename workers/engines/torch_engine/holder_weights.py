"""One copy of a model's weights on an accelerator, with its holder; replicas map it for reading.

The first replica fills it, tensor by tensor in the type it computes in, seals it with a checksum and maps
it like the others. One that is built again reads nothing of the model: it maps, allocates KV, serves.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workers.engines.torch_engine.borrowed_memory import tensor_over
from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.holder_place import HolderPlace
from workers.engines.torch_engine.weights import (
    FusedTensor,
    ModelWeights,
    WeightsError,
    assemble,
    plan_tensors,
    read_tensors,
    weight_files,
)
from workers.kv.holder_link import HolderLink
from workers.kv.holder_wire import Done, OpenWeights, RejectWeights, SealWeights, Weights
from workers.kv.memory import Piece

log = logging.getLogger(__name__)

_FORMAT = 1
"""Part of every name: raised when the same model would be laid out otherwise."""
_ALIGNMENT_BYTES = 256
_WAIT_SECONDS = 1800.0
"""For another replica that fills: as long as reading the largest model from a slow disk may take."""
_ANSWER_SECONDS = 60.0
"""Loading has time."""
_ATTEMPTS = 2
_CHECKED_WORDS = 1 << 22
"""At a time: 32 MB and as much again for the arithmetic."""

_uses: list[HolderLink] = []
"""Left open on purpose: the holder hears by their hanging up, however it comes, that nothing is used here."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where each tensor lies in the copy."""

    tensors: tuple[FusedTensor, ...]
    offsets_bytes: tuple[int, ...]
    size_bytes: int
    dtype: torch.dtype

    def lay_over(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the tensors in memory, `[bytes]` of uint8, by name."""
        return {
            tensor.name: memory[at : at + _bytes_of(tensor, self.dtype)].view(self.dtype).view(tensor.shape)
            for tensor, at in zip(self.tensors, self.offsets_bytes, strict=True)
        }


def hold_weights(
    place: HolderPlace,
    model_dir: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    model_digest: str,
    on_progress: Callable[[float], None],
) -> ModelWeights:
    """Map a model's weights that the holder has, after filling them if nobody has yet.

    The place's connection is in use from then on, for as long as this process lives.
    `model_digest` names the model's content; without one, its files are told apart by size and times.
    Raises `OSError` if there is no holder or no memory, `WeightsError` if the model cannot be read, changed
    while it was read, or is not what was sealed time after time.
    """
    plan = _plan(config, dtype, place.link.hello.page_bytes)
    name = _name(model_digest or _describe_files(model_dir), plan)
    link = place.link
    _uses.append(link)
    try:
        for _ in range(_ATTEMPTS):
            answer, piece = _open(place, link, OpenWeights(name, plan.size_bytes))
            if answer.state == "fill":
                checksum = _fill(place, piece, plan, model_dir, on_progress)
                link.ask(SealWeights(name, checksum), Done, seconds=_ANSWER_SECONDS)
                answer, piece = _open(place, link, OpenWeights(name, plan.size_bytes))
            memory = _map_sealed(place, piece, answer.checksum)
            if memory is not None:
                on_progress(1.0)
                log.info("weights %s of the holder, %d bytes", name, plan.size_bytes)
                return assemble(config, plan.lay_over(memory))
            log.error("weights %s with the holder are not what was sealed", name)
            link.ask(RejectWeights(name), Done, seconds=_ANSWER_SECONDS)
    except (OSError, WeightsError):
        _uses.remove(link)
        link.close()
        raise
    raise WeightsError(f"weights {name} with the holder are not what was sealed, {_ATTEMPTS} times")


def checksum_of(memory: Tensor) -> str:
    """Return 16 hex digits that depend on each byte of `[bytes]`, a multiple of 8, and on its place.

    Against damage and not against forgery. Fast where the memory is: an accelerator reads all of it in
    milliseconds.
    """
    words = memory.view(torch.int64)
    total = 0
    for start in range(0, len(words), _CHECKED_WORDS):
        part = words[start : start + _CHECKED_WORDS]
        places = torch.arange(start, start + len(part), device=memory.device)
        total += int((part * (2 * places + 1)).sum())
    return f"{total % (1 << 64):016x}"


def _plan(config: ModelConfig, dtype: torch.dtype, page_bytes: int) -> _Plan:
    tensors = plan_tensors(config)
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += _round_up(_bytes_of(tensor, dtype), _ALIGNMENT_BYTES)
    return _Plan(tensors, tuple(offsets), _round_up(end, page_bytes), dtype)


def _name(content: str, plan: _Plan) -> str:
    shapes = [(tensor.name, tensor.parts) for tensor in plan.tensors]
    layout = repr((_FORMAT, content, str(plan.dtype), shapes))
    return hashlib.blake2b(layout.encode(), digest_size=16).hexdigest()


def _open(place: HolderPlace, link: HolderLink, request: OpenWeights) -> tuple[Weights, Piece]:
    answer, descriptors = link.ask(request, Weights, seconds=_WAIT_SECONDS)
    (descriptor,) = descriptors
    return answer, place.memory.adopt(descriptor, answer.size_bytes)


def _fill(
    place: HolderPlace, piece: Piece, plan: _Plan, model_dir: Path, on_progress: Callable[[float], None]
) -> str:
    """Write all tensors and let go of the writable mapping; returns the checksum."""
    memory = place.memory
    before = _describe_files(model_dir)
    address = memory.reserve(piece.size_bytes)
    try:
        memory.map(address, piece, writable=True)
        try:
            whole = tensor_over(address, piece.size_bytes, place.device)
            places = plan.lay_over(whole)
            read = read_tensors(model_dir, plan.tensors, device=place.device, dtype=plan.dtype)
            for done, (tensor, content) in enumerate(zip(plan.tensors, read, strict=True), 1):
                places[tensor.name].copy_(content)
                on_progress(done / len(plan.tensors))
            memory.settle()
            checksum = checksum_of(whole)
        finally:
            memory.unmap(address, piece.size_bytes)
    finally:
        memory.release(piece)
        memory.unreserve(address, piece.size_bytes)
    if _describe_files(model_dir) != before:
        raise WeightsError(f"the weights in {model_dir} changed while they were read")
    return checksum


def _map_sealed(place: HolderPlace, piece: Piece, checksum: str) -> Tensor | None:
    """Map a copy for reading, for as long as this process lives; `None`: it is not what was sealed."""
    memory = place.memory
    address = memory.reserve(piece.size_bytes)
    memory.map(address, piece, writable=False)
    memory.release(piece)  # the mapping keeps the memory
    whole = tensor_over(address, piece.size_bytes, place.device)
    if checksum_of(whole) == checksum:
        return whole
    memory.unmap(address, piece.size_bytes)
    memory.unreserve(address, piece.size_bytes)
    return None


def _describe_files(model_dir: Path) -> str:
    try:
        facts = [(path.name, path.stat()) for path in weight_files(model_dir)]
    except OSError as error:
        raise WeightsError(f"cannot read the weights in {model_dir}: {error}") from error
    return repr(
        [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in facts]
    )


def _bytes_of(tensor: FusedTensor, dtype: torch.dtype) -> int:
    return torch.Size(tensor.shape).numel() * dtype.itemsize


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
