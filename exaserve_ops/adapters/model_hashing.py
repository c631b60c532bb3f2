"""Reads files once, and computes what names them (SHA-256) and what their pieces are checked by (BLAKE3)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from workers.protocol.manifest import PIECE_BYTES, ManifestFile

_MOST_AT_ONCE = 4
"""Files that are hashed at once; both digests of one are computed at the same time anyway."""


def hash_files(
    folder: Path, names: Sequence[str], progress: Callable[[int], None]
) -> tuple[ManifestFile, ...]:
    """Hash files of a folder, several at once; `progress` is told the bytes of each piece.

    Raises `OSError`.
    """
    at_once = max(1, min(_MOST_AT_ONCE, os.cpu_count() or 1, len(names)))
    with (
        ThreadPoolExecutor(at_once, "hash-model") as readers,
        ThreadPoolExecutor(at_once, "sha256") as helpers,
    ):
        read = [readers.submit(_hash, folder, name, progress, helpers) for name in names]
        try:
            return tuple(one.result() for one in read)
        finally:
            for one in read:
                one.cancel()  # after a failure; those that ended take no notice


def _hash(
    folder: Path, name: str, progress: Callable[[int], None], helpers: ThreadPoolExecutor
) -> ManifestFile:
    whole = hashlib.sha256()
    pieces = []
    with (folder / name).open("rb", buffering=0) as file:
        while piece := _read_piece(file.readinto):
            # Both let go of the interpreter's lock meanwhile.
            hashing = helpers.submit(whole.update, piece)
            pieces.append(blake3(piece).digest())
            hashing.result()
            progress(len(piece))
        return ManifestFile(name, file.tell(), whole.hexdigest(), b"".join(pieces))


def _read_piece(readinto: Callable[[memoryview], int | None]) -> bytes | memoryview:
    """Read one piece; shorter only at the end of the file."""
    piece = memoryview(bytearray(PIECE_BYTES))
    filled = 0
    while filled < PIECE_BYTES and (count := readinto(piece[filled:])):
        filled += count
    return piece[:filled]
