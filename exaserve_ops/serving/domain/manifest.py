"""The list of a model's files, and the digests that name it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: path relative to the model's folder."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class EncodedManifest:
    """Sizes and digests of all files and of their pieces, as nodes read them."""

    digest: str
    """SHA-256 of the bytes: what nodes are told, and accept no others for."""
    body: bytes


def revision_of(files: Iterable[FileEntry]) -> str:
    """Name a model by its files: `sha256:` over the sorted lines `<sha256>  <size>  <path>`."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.path):
        digest.update(f"{file.sha256}  {file.size_bytes}  {file.path}\n".encode())
    return f"sha256:{digest.hexdigest()}"
