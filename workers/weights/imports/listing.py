"""Which files a place has, which of them a model needs, and whether these can be one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

import msgspec

from workers.protocol import manifest as manifests
from workers.protocol.manifest import MAX_FILE_BYTES, MAX_FILES, ManifestError
from workers.protocol.shards import MAX_CONFIG_BYTES, MAX_INDEX_BYTES, SUFFIX

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
NEEDED = (
    *("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"),
    *("LICENSE*", "NOTICE*"),
)
"""What is taken where nothing else is asked for: no weights in a second format, no pictures."""


class UnfitError(Exception):
    """A place whose files are no model that could be served; the text names what is wrong."""


class ListedFile(msgspec.Struct, frozen=True):
    """One file as its place tells of it."""

    path: str
    size_bytes: int
    sha256: str = ""
    """As the place says, in hex; empty: it does not."""
    git_sha1: str = ""
    """Of a small file in a hub: git's name of it."""
    version: str = ""
    """Other text means other bytes."""


class Listing(msgspec.Struct, frozen=True):
    """All files that are taken, by path."""

    location: str
    """The place as it stays: of a hub with the commit."""
    files: tuple[ListedFile, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


class Lister(Protocol):
    """Asks one place for its files."""

    def list_files(self) -> Listing:
        """All files of the place. Raises `SourceError`, or `UnfitError`."""
        ...


def choose(listing: Listing, patterns: Collection[str]) -> Listing:
    """Those files that are asked for. Raises `UnfitError` unless they can be a model."""
    wanted = tuple(patterns) or NEEDED
    files = sorted(
        (file for file in listing.files if not _hides(file.path) and _matches(file.path, wanted)),
        key=lambda file: file.path,
    )
    _check(files, offered=len(listing.files))
    return Listing(listing.location, tuple(files))


def changed_paths(before: Listing, after: Listing) -> set[str]:
    """Files of `before` that are not in `after` as they were."""
    return {file.path for file in set(before.files) - set(after.files)}


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _hides(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _check(files: Sequence[ListedFile], *, offered: int) -> None:
    paths = [file.path for file in files]
    if len(paths) > MAX_FILES:
        raise UnfitError(f"it has {len(paths):,} files; {MAX_FILES:,} are allowed")
    for name in (CONFIG, TOKENIZER):
        if name not in paths:
            raise UnfitError(f"{name} is not among the {len(paths)} files taken of {offered} there")
    if not any(path.endswith(SUFFIX) for path in paths):
        raise UnfitError(f"no {SUFFIX} file is among the {len(paths)} files taken of {offered} there")
    try:
        manifests.check_paths(paths)
    except ManifestError as error:
        raise UnfitError(str(error)) from error
    limits = {CONFIG: MAX_CONFIG_BYTES, INDEX: MAX_INDEX_BYTES}
    for file in files:
        most = limits.get(file.path, MAX_FILE_BYTES)
        if not 0 <= file.size_bytes <= most:
            raise UnfitError(f"{file.path} claims {file.size_bytes:,} bytes; {most:,} are allowed")
