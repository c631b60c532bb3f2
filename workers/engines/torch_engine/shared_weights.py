"""One copy of a model's weights for all replicas of a node: a file that each of them maps.

The first replica writes the tensors, fused and in the type it computes in, into a file of the node's
cache. It and all later ones map that file, so its pages lie in memory once, in the page cache, however
many replicas use them, and a replica that is built again reads nothing: it maps, allocates KV, serves.
The mapping is private, copy on write: a replica that scribbles on its weights harms itself alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.weights import (
    FusedTensor,
    ModelWeights,
    WeightsError,
    assemble,
    plan_tensors,
    read_tensors,
    weight_files,
)

log = logging.getLogger(__name__)

_FORMAT = 1
"""Part of every file's name: raised when the same model would be laid out otherwise."""
_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""How safetensors spells them."""
_PAGE_BYTES = 4096
_HASH_CHUNK_BYTES = 4 * 1024 * 1024
_FREE_MARGIN_RATIO = 0.05
"""Part of the file's size that must be free beyond it: a full disk stops journals and logs too."""
_PRIVATE_FOLDER, _PRIVATE_FILE, _READ_ONLY = 0o700, 0o600, 0o400


class NoRoomError(OSError):
    """The cache's disk cannot take the copy; the message gives the numbers."""


@dataclass(frozen=True, slots=True)
class _Seal:
    """What the copy was when it was written. It lies beside the copy as JSON."""

    blake2b: str
    fingerprint: tuple[int, ...]
    """Size, times and inode: while they are the same, the digest need not be worked out again."""


def map_weights(
    cache: Path,
    model_dir: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    model_digest: str,
    on_progress: Callable[[float], None],
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> ModelWeights:
    """Map the node's copy of a model, writing it first if there is none.

    `model_digest` names the model's content; without one, its files are told apart by size and times.
    A copy that is not what was written is thrown away and written anew. Replicas that start together
    wait for one of them to write. Raises `NoRoomError`, `WeightsError` or `OSError`.
    """
    cache.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
    plan = plan_tensors(config)
    copy = _Copy(cache, _name(model_digest or _describe_files(model_dir), plan, dtype))
    copy.mark_in_use()
    if not copy.is_whole():
        with copy.lock():
            if not copy.is_whole():
                _make_room(copy, _copy_bytes(plan, dtype), free_bytes)
                _write(copy, model_dir, plan, dtype, on_progress)
    on_progress(1.0)
    try:
        with safe_open(copy.path, framework="pt", device="cpu") as opened:
            return assemble(config, {tensor.name: opened.get_tensor(tensor.name) for tensor in plan})
    except SafetensorError as error:
        raise WeightsError(f"cannot map {copy.path}: {error}") from error


def _name(content: str, plan: Iterable[FusedTensor], dtype: torch.dtype) -> str:
    layout = repr((_FORMAT, content, str(dtype), [(tensor.name, tensor.parts) for tensor in plan]))
    return hashlib.blake2b(layout.encode(), digest_size=16).hexdigest()


def _describe_files(model_dir: Path) -> str:
    return repr([(path.name, _fingerprint(path)) for path in weight_files(model_dir)])


def _fingerprint(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class _Copy:
    """One model's copy in the cache: the file, its seal, and the locks of those that use it."""

    def __init__(self, cache: Path, name: str) -> None:
        self.cache = cache
        self.path = cache / f"{name}.safetensors"
        self._seal_path = cache / f"{name}.json"
        self._use_path = cache / f"{name}.use"
        self._lock_path = cache / f"{name}.lock"

    def mark_in_use(self) -> None:
        """Keep the copy from being removed for as long as this process lives."""
        # Left open on purpose: the kernel lets go of the lock with the process, however it ends.
        fcntl.flock(_open_lock(self._use_path), fcntl.LOCK_SH)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only one that writes; what a killed writer left is removed."""
        descriptor = _open_lock(self._lock_path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self.draft.unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)

    @property
    def draft(self) -> Path:
        """Where the copy grows before it is renamed into place."""
        return self.path.with_suffix(".part")

    def is_whole(self) -> bool:
        """Whether the copy is there and is what was written."""
        try:
            facts = json.loads(self._seal_path.read_text())
            seal = _Seal(facts["blake2b"], tuple(facts["fingerprint"]))
            if _fingerprint(self.path) == seal.fingerprint:
                return True
            if _digest(self.path) == seal.blake2b:
                self.seal(seal.blake2b)
                return True
        except (OSError, WeightsError, ValueError, KeyError, TypeError):
            return False
        log.error("%s is not what was written there; it is made anew", self.path)
        return False

    def seal(self, blake2b: str) -> None:
        """Write down what the copy is now."""
        facts = json.dumps(asdict(_Seal(blake2b, _fingerprint(self.path))))
        draft = self._seal_path.with_suffix(".new")
        draft.write_text(facts)
        draft.replace(self._seal_path)

    def remove_if_unused(self) -> bool:
        """Remove the copy unless a living process maps it."""
        descriptor = _open_lock(self._use_path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            self._seal_path.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
            return True
        finally:
            os.close(descriptor)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)


def _digest(path: Path) -> str:
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _write(
    copy: _Copy,
    model_dir: Path,
    plan: tuple[FusedTensor, ...],
    dtype: torch.dtype,
    on_progress: Callable[[float], None],
) -> None:
    """Write the copy beside its place, then rename it into it."""
    before = _describe_files(model_dir)
    header, size = _header(plan, dtype), _copy_bytes(plan, dtype)
    digest = hashlib.blake2b()
    descriptor = os.open(copy.draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _READ_ONLY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(header)
            digest.update(header)
            tensors = read_tensors(model_dir, plan, device=torch.device("cpu"), dtype=dtype)
            for done, tensor in enumerate(tensors, 1):
                content = _bytes(tensor)
                file.write(content)
                digest.update(content)
                on_progress(done / len(plan))
            file.flush()
            os.fsync(file.fileno())
        if _describe_files(model_dir) != before:
            raise WeightsError(f"the weights in {model_dir} changed while they were read")
        copy.draft.replace(copy.path)
    finally:
        copy.draft.unlink(missing_ok=True)
    copy.seal(digest.hexdigest())
    log.info("weights for all replicas of this node written to %s, %d bytes", copy.path, size)


def _header(plan: Iterable[FusedTensor], dtype: torch.dtype) -> bytes:
    """Return the head of a safetensors file, padded so that the tensors begin on a page."""
    entries: dict[str, object] = {}
    offset = 0
    for tensor in plan:
        end = offset + _bytes_of(tensor, dtype)
        entries[tensor.name] = {
            "dtype": _TYPE_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    length_field = 8
    text += b" " * (-(len(text) + length_field) % _PAGE_BYTES)
    return len(text).to_bytes(length_field, "little") + text


def _copy_bytes(plan: tuple[FusedTensor, ...], dtype: torch.dtype) -> int:
    return len(_header(plan, dtype)) + sum(_bytes_of(tensor, dtype) for tensor in plan)


def _bytes_of(tensor: FusedTensor, dtype: torch.dtype) -> int:
    return torch.Size(tensor.shape).numel() * dtype.itemsize


def _bytes(tensor: Tensor) -> memoryview:
    # As plain bytes: numpy, and with it the buffer protocol, has no bfloat16.
    return tensor.contiguous().view(torch.uint8).flatten().numpy().data


def _make_room(copy: _Copy, size_bytes: int, free_bytes: Callable[[Path], int]) -> None:
    """Remove copies that nobody maps, oldest first, until this one fits. Raises `NoRoomError`."""
    wanted = int(size_bytes * (1 + _FREE_MARGIN_RATIO))
    others = sorted(
        (path for path in copy.cache.glob("*.safetensors") if path != copy.path),
        key=lambda path: path.stat().st_mtime,
    )
    for path in others:
        if free_bytes(copy.cache) >= wanted:
            return
        if _Copy(copy.cache, path.stem).remove_if_unused():
            log.info("removed %s: no replica uses it and its room is needed", path)
    free = free_bytes(copy.cache)
    if free < wanted:
        raise NoRoomError(
            f"{copy.cache} has {free} bytes free and shared weights take {wanted} with their margin"
        )
