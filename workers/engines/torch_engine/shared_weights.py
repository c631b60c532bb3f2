"""One copy of a model's weights for all replicas of a node: a file that each of them maps.

The first replica writes the tensors, fused and in the type it computes in, into a file of the node's
cache. It and all later ones map that file, so its pages lie in memory once, in the page cache, however
many replicas use them, and a replica that is built again reads nothing: it maps, allocates KV, serves.
The mapping is private, copy on write: a replica that scribbles on its weights harms itself alone.

Matrices may lie in the file as oneDNN packs them, so that sharing costs no speed. Such a copy is for one
kind of processor and one torch; a process with another makes its own beside it.
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
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.packing import (
    PackingError,
    describe_packed,
    layout_key,
    pack,
    unpack_from,
)
from workers.engines.torch_engine.weights import (
    FusedTensor,
    Matrix,
    ModelWeights,
    WeightsError,
    assemble,
    plan_tensors,
    read_tensors,
    weight_files,
)

log = logging.getLogger(__name__)

_FORMAT = 2
"""Part of every file's name: raised when the same model would be laid out otherwise."""
_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""How safetensors spells them."""
_PAGE_BYTES = 4096
_BYTES_TYPE = "U8"
_HASH_CHUNK_BYTES = 4 * 1024 * 1024
_FREE_MARGIN_RATIO = 0.05
"""Part of the file's size that must be free beyond it: a full disk stops journals and logs too."""
_PRIVATE_FOLDER, _PRIVATE_FILE, _READ_ONLY = 0o700, 0o600, 0o400


@dataclass(frozen=True, slots=True)
class CopyKind:
    """How the tensors of a copy lie in it."""

    dtype: torch.dtype
    packed: bool
    """Whether matrices lie in oneDNN's layout; only where `packing.packs_to_bytes` finds nothing wrong."""


class NoRoomError(OSError):
    """The cache's disk cannot take the copy; the message gives the numbers."""


@dataclass(frozen=True, slots=True)
class _Seal:
    """What the copy was when it was written. It lies beside the copy as JSON."""

    blake2b: str
    fingerprint: tuple[int, ...]
    """Size, times and inode: while they are the same, the digest need not be worked out again."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor's place in the file."""

    tensor: FusedTensor
    size_bytes: int
    layout: bytes | None
    """Of a packed matrix, which is padded to whole pages."""


def map_weights(
    cache: Path,
    model_dir: Path,
    config: ModelConfig,
    kind: CopyKind,
    *,
    model_digest: str,
    on_progress: Callable[[float], None],
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> ModelWeights:
    """Map the node's copy of a model, writing it first if there is none.

    `model_digest` names the model's content; without one, its files are told apart by size and times.
    A copy that is not what was written is thrown away and written anew. Replicas that start together
    wait for one of them to write. Raises `NoRoomError`, `WeightsError`, `PackingError` or `OSError`.
    """
    cache.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
    plan = plan_tensors(config, packed=kind.packed)
    copy = _Copy(cache, _name(model_digest or _describe_files(model_dir), plan, kind))
    copy.mark_in_use()
    if not copy.is_whole():
        with copy.lock():
            if not copy.is_whole():
                entries = _lay_out(plan, kind)
                _make_room(copy, _copy_bytes(entries, kind.dtype), free_bytes)
                _write(copy, model_dir, entries, kind.dtype, on_progress)
    on_progress(1.0)
    return assemble(config, _read(copy.path, plan, kind))


def _name(content: str, plan: Iterable[FusedTensor], kind: CopyKind) -> str:
    machine = layout_key(kind.dtype) if kind.packed else ""
    tensors = [(tensor.name, tensor.parts) for tensor in plan]
    layout = repr((_FORMAT, content, str(kind.dtype), tensors, machine))
    return hashlib.blake2b(layout.encode(), digest_size=16).hexdigest()


def _lay_out(plan: Iterable[FusedTensor], kind: CopyKind) -> tuple[_Entry, ...]:
    """Give each tensor its place: packed matrices first, so that each of them begins on a page."""
    packed, plain = [], []
    for tensor in plan:
        if kind.packed and tensor.is_matrix:
            layout, size = describe_packed(tensor.shape, kind.dtype)
            packed.append(_Entry(tensor, size + -size % _PAGE_BYTES, layout))
        else:
            plain.append(_Entry(tensor, torch.Size(tensor.shape).numel() * kind.dtype.itemsize, None))
    return (*packed, *plain)


def _read(path: Path, plan: Iterable[FusedTensor], kind: CopyKind) -> dict[str, Matrix]:
    """Map all tensors by name."""
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            layouts = opened.metadata() or {}
            tensors: dict[str, Matrix] = {tensor.name: opened.get_tensor(tensor.name) for tensor in plan}
    except SafetensorError as error:
        raise WeightsError(f"cannot map {path}: {error}") from error
    if kind.packed:
        for tensor in plan:
            memory = tensors[tensor.name]
            if tensor.is_matrix and isinstance(memory, Tensor):
                layout = bytes.fromhex(layouts[tensor.name])
                tensors[tensor.name] = unpack_from(memory, tensor.shape, kind.dtype, layout)
    return tensors


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
    entries: tuple[_Entry, ...],
    dtype: torch.dtype,
    on_progress: Callable[[float], None],
) -> None:
    """Write the copy beside its place, then rename it into it."""
    before = _describe_files(model_dir)
    header, size = _header(entries, dtype), _copy_bytes(entries, dtype)
    digest = hashlib.blake2b()
    descriptor = os.open(copy.draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _READ_ONLY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            for part in chain([header], _contents(model_dir, entries, dtype, on_progress)):
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())
        if _describe_files(model_dir) != before:
            raise WeightsError(f"the weights in {model_dir} changed while they were read")
        copy.draft.replace(copy.path)
    finally:
        copy.draft.unlink(missing_ok=True)
    copy.seal(digest.hexdigest())
    log.info("weights for all replicas of this node written to %s, %d bytes", copy.path, size)


def _contents(
    model_dir: Path,
    entries: tuple[_Entry, ...],
    dtype: torch.dtype,
    on_progress: Callable[[float], None],
) -> Iterator[bytes | memoryview]:
    """Yield what the tensors are in the file, one after the other; each is valid until the next."""
    plan = tuple(entry.tensor for entry in entries)
    tensors = read_tensors(model_dir, plan, device=torch.device("cpu"), dtype=dtype)
    for done, (entry, tensor) in enumerate(zip(entries, tensors, strict=True), 1):
        if entry.layout is None:
            yield _bytes(tensor)
        else:
            packed = pack(tensor)
            if packed.layout != entry.layout:
                raise PackingError(f"{entry.tensor.name} was packed otherwise than others of its shape")
            yield packed.content
            yield bytes(entry.size_bytes - packed.nbytes)
        on_progress(done / len(entries))


def _header(entries: Iterable[_Entry], dtype: torch.dtype) -> bytes:
    """Return the head of a safetensors file, padded so that the tensors begin on a page."""
    layouts = {entry.tensor.name: entry.layout.hex() for entry in entries if entry.layout is not None}
    places: dict[str, object] = {"__metadata__": layouts}
    offset = 0
    for entry in entries:
        end = offset + entry.size_bytes
        plain = entry.layout is None
        places[entry.tensor.name] = {
            "dtype": _TYPE_NAMES[dtype] if plain else _BYTES_TYPE,
            "shape": list(entry.tensor.shape) if plain else [entry.size_bytes],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(places).encode()
    length_field = 8
    text += b" " * (-(len(text) + length_field) % _PAGE_BYTES)
    return len(text).to_bytes(length_field, "little") + text


def _copy_bytes(entries: tuple[_Entry, ...], dtype: torch.dtype) -> int:
    return len(_header(entries, dtype)) + sum(entry.size_bytes for entry in entries)


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
