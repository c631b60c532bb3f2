"""The list of a model's files, and the digest that names it."""

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


def manifest_digest(files: Iterable[FileEntry]) -> str:
    """`sha256:` over the sorted lines `<sha256>  <size>  <path>`."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.path):
        digest.update(f"{file.sha256}  {file.size_bytes}  {file.path}\n".encode())
    return f"sha256:{digest.hexdigest()}"
