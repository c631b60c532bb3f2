"""The manifest of a model's revision: every file with its size, its SHA-256 and the digests of its pieces.

A manifest is named by the SHA-256 of its bytes, so whoever was told its name (in a sealed command) may take
the bytes from anywhere: `decode` refuses others. It may be megabytes, so it never travels in a message; the
control plane keeps it in Postgres and lays it out in Redis under `key_of(digest)`.

Pieces are what is fetched, checked and passed on between nodes: each file is cut into pieces of
`piece_bytes`, the last one shorter; an empty file has none. Piece digests are BLAKE3.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import unicodedata
from itertools import pairwise

import msgspec

PIECE_BYTES = 4 * 1024 * 1024
"""Size of a piece where nothing else is asked for."""
PIECE_DIGEST_BYTES = 32
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
"""Of one encoded manifest: that of 2 TB in pieces of 4 MiB takes a quarter."""
MAX_FILES = 20_000
MAX_FILE_BYTES = 1 << 44
MAX_PATH_CHARACTERS = 500
MAX_NAME_BYTES = 255
"""Of one part of a path, as file systems have it."""

_PIECE_SIZES = (64 * 1024, 64 * 1024 * 1024)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEY_PREFIX = "exaops:manifest:"


class ManifestError(ValueError):
    """Not a manifest that may be used; the text says why and names the file."""


class ManifestFile(msgspec.Struct, frozen=True, array_like=True):
    """One file: its path relative to the model's folder, with `/`."""

    path: str
    size_bytes: int
    sha256: str
    """64 hex digits."""
    pieces: bytes
    """Digests of its pieces in order, 32 bytes each."""

    def piece_digest(self, index: int) -> bytes:
        """Digest of one piece, counted from 0."""
        return self.pieces[PIECE_DIGEST_BYTES * index : PIECE_DIGEST_BYTES * (index + 1)]

    @property
    def piece_count(self) -> int:
        """Number of its pieces."""
        return len(self.pieces) // PIECE_DIGEST_BYTES


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """All files of one revision, by path."""

    revision: str
    """`sha256:…`, the model's digest: `revision_of` these files."""
    piece_bytes: int
    files: tuple[ManifestFile, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def piece_count(self) -> int:
        """Number of pieces of all files."""
        return sum(file.piece_count for file in self.files)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode(manifest: Manifest) -> tuple[str, bytes]:
    """Return a manifest's name and bytes. Raises `ManifestError` for one that nobody may use."""
    check(manifest)
    data = _encoder.encode(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"a manifest of {len(data):,} bytes is over {MAX_MANIFEST_BYTES:,}")
    return digest_of(data), data


def decode(data: bytes, digest: str) -> Manifest:
    """Read the manifest of that name. Raises `ManifestError` for other bytes, and for unsafe contents."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"a manifest of {len(data):,} bytes is over {MAX_MANIFEST_BYTES:,}")
    if not hmac.compare_digest(digest_of(data), digest):
        raise ManifestError(f"the bytes are not those of manifest {digest[:19]}…")
    try:
        manifest = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ManifestError(f"not a manifest: {error}") from error
    check(manifest)
    return manifest


def digest_of(data: bytes) -> str:
    """Name of an encoded manifest."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def key_of(digest: str) -> str:
    """Redis key under which the control plane lays the manifest of that name."""
    return _KEY_PREFIX + digest


def revision_of(files: tuple[ManifestFile, ...]) -> str:
    """Digest that names a model: over the sorted lines `<sha256>  <size>  <path>`."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.path):
        digest.update(f"{file.sha256}  {file.size_bytes}  {file.path}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def piece_count_of(size_bytes: int, piece_bytes: int) -> int:
    """Number of pieces of a file."""
    return -(-size_bytes // piece_bytes)


def piece_span(file: ManifestFile, index: int, piece_bytes: int) -> tuple[int, int]:
    """Offset and length in bytes of one piece of a file."""
    offset = index * piece_bytes
    return offset, min(piece_bytes, file.size_bytes - offset)


def check(manifest: Manifest) -> None:
    """Refuse what does not add up, or could write outside its folder. Raises `ManifestError`."""
    least, most = _PIECE_SIZES
    if not least <= manifest.piece_bytes <= most or manifest.piece_bytes % least:
        raise ManifestError(f"pieces of {manifest.piece_bytes:,} bytes; {least:,} to {most:,} are allowed")
    if not 0 < len(manifest.files) <= MAX_FILES:
        raise ManifestError(f"{len(manifest.files):,} files; 1 to {MAX_FILES:,} are allowed")
    for file in manifest.files:
        _check_file(file, manifest.piece_bytes)
    check_paths([file.path for file in manifest.files])
    if not _DIGEST.fullmatch(manifest.revision) or revision_of(manifest.files) != manifest.revision:
        raise ManifestError(f"its files are not those of revision {manifest.revision[:19]}…")


def check_paths(paths: list[str]) -> None:
    """Refuse paths that leave the folder, or that one file system would take for one another.

    Raises `ManifestError`. Paths must come sorted and once each.
    """
    if any(a >= b for a, b in pairwise(paths)):
        raise ManifestError("its files are not in the order of their paths, or one comes twice")
    places: dict[str, str] = {}
    for path in paths:
        _check_path(path)
        other = places.setdefault(_as_any_file_system(path), path)
        if other != path:
            raise ManifestError(f"{other!r} and {path!r} would be one file on some file systems")
    for path in paths:
        parents = path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            folder = "/".join(parents[:depth])
            if _as_any_file_system(folder) in places:
                raise ManifestError(f"{folder!r} is a file and the folder of {path!r}")


def _check_path(path: str) -> None:
    if not path or len(path) > MAX_PATH_CHARACTERS or not path.isprintable() or "\\" in path:
        raise ManifestError(f"{path[:80]!r} is no path of a model's file")
    for part in path.split("/"):
        # A leading dot would also be `.`, `..`, or a file that listings hide.
        if not part or part.startswith(".") or len(_utf8(part)) > MAX_NAME_BYTES:
            raise ManifestError(f"{path[:80]!r} is no path inside a model's folder")


def _check_file(file: ManifestFile, piece_bytes: int) -> None:
    if not 0 <= file.size_bytes <= MAX_FILE_BYTES:
        raise ManifestError(f"{file.path[:80]!r} claims {file.size_bytes:,} bytes")
    if not _SHA256.fullmatch(file.sha256):
        raise ManifestError(f"{file.path[:80]!r} has no SHA-256")
    if len(file.pieces) != PIECE_DIGEST_BYTES * piece_count_of(file.size_bytes, piece_bytes):
        raise ManifestError(f"{file.path[:80]!r} has not one digest for each of its pieces")


def _as_any_file_system(path: str) -> str:
    """Equal for paths that differ in case or in how letters are composed."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ManifestError(f"{text[:80]!r} is no text") from error
