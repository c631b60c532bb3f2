"""Models that a node takes in from a hub, a server or a bucket, and what it finds there. Since 1.6."""

from __future__ import annotations

import enum
import hashlib
import hmac

import msgspec

from workers.protocol.part import Part

FINDINGS_PART_BYTES = 128 * 1024
MAX_FINDINGS_BYTES = 96 * 1024 * 1024
"""Of what is found: the largest manifest, and the files of settings beside it."""


class FindingsError(ValueError):
    """Bytes that are no findings, or others than those that were announced."""


class WeightsImport(Part, frozen=True, kw_only=True):
    """One model that this node fetches from a place which nobody has a manifest of."""

    import_id: str
    kind: str
    """`hub`, `http` or `s3`."""
    location: str
    """`https://hub/owner/name`, `https://host/path`, `s3://bucket/prefix`."""
    secret: str = ""
    """Name of a secret that lies on the node, never the secret."""
    revision: str = ""
    """Of a hub: branch, tag or commit. Empty: `main`."""
    files: tuple[str, ...] = ()
    """Names, or patterns with `*`, of what is taken; empty: what an engine needs."""
    attempt: int = 1
    """Rises when somebody has it tried again."""
    paused: bool = False
    """What is there is kept, and nothing is done: it failed, and somebody may have it tried again."""
    name: str = ""
    """For people."""


class ImportState(enum.Enum):
    """How an import stands on its node."""

    WAITING = "waiting"
    """The reason says what for."""
    LISTING = "listing"
    """The place is asked for its files."""
    FETCHING = "fetching"
    FOUND = "found"
    """All of it lies on the disk of this node, checked; what was found is being told."""
    FAILED = "failed"
    """It is not to be had as things are; the reason says why. Tried again when the attempt rises."""


class ImportSeen(Part, frozen=True, kw_only=True):
    """An import as it goes."""

    import_id: str
    state: ImportState
    attempt: int = 1
    reason: str = ""
    location: str = ""
    """The place as it stays: of a hub with the commit. Empty until it is listed."""
    files: int = 0
    files_done: int = 0
    total_bytes: int = 0
    have_bytes: int = 0
    bytes_per_second: float = 0.0
    eta_seconds: float | None = None
    findings_digest: str = ""
    """Names the findings whose parts are sent; empty before."""


class Findings(msgspec.Struct, frozen=True, array_like=True):
    """What an import found: all that the control plane records of a model."""

    location: str
    """Where other nodes may fetch it from, too."""
    manifest_digest: str
    manifest: bytes
    """As `manifest.encode` has it."""
    config: bytes
    """config.json."""
    parameter_count: int
    shards: tuple[str, ...]
    """Files that the index names, by path; none: there is no index."""


_decoder = msgspec.msgpack.Decoder(Findings)


def encode_findings(findings: Findings) -> tuple[str, bytes]:
    """Return name and bytes of findings. Raises `FindingsError` for too many."""
    data = msgspec.msgpack.encode(findings)
    if len(data) > MAX_FINDINGS_BYTES:
        raise FindingsError(f"findings of {len(data):,} bytes are over {MAX_FINDINGS_BYTES:,}")
    return hashlib.sha256(data).hexdigest(), data


def decode_findings(data: bytes, digest: str) -> Findings:
    """Read the findings of that name. Raises `FindingsError` for other bytes."""
    if len(data) > MAX_FINDINGS_BYTES or not hmac.compare_digest(hashlib.sha256(data).hexdigest(), digest):
        raise FindingsError(f"{len(data):,} bytes are not findings {digest[:16]}")
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise FindingsError(f"no findings: {error}") from error


def part_count(total_bytes: int) -> int:
    """Number of parts that so many bytes travel in."""
    return -(-total_bytes // FINDINGS_PART_BYTES)
