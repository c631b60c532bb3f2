"""Which places nodes can fetch weights from."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.weights.domain.wanted import Origin
from workers.protocol.addresses import names_reserved_host

SCHEMES = {"folder": ("file",), "http": ("http", "https"), "hub": ("http", "https"), "s3": ("s3",)}
"""Schemes of the locations of each kind of origin."""
MAX_ORIGINS = 8
MAX_SECRET_NAME = 64


IMPORT_KINDS = ("hub", "http", "s3")
MAX_REVISION = 200
MAX_PATTERNS = 1000
MAX_PATTERN_CHARACTERS = 500


def check_place(
    origin: Origin, *, revision: str = "", files: Collection[str] = (), allow_local: bool = False
) -> None:
    """Refuse a place that no node could take a model in from, or should ask. Raises `InvalidInputError`.

    `allow_local`: hosts that mean the node itself, or its cloud's metadata service, are no fault. What a name
    stands for is looked at by the node, whenever it connects.
    """
    if origin.kind not in IMPORT_KINDS:
        raise InvalidInputError("kind", f"'{origin.kind}' is none of {', '.join(IMPORT_KINDS)}")
    try:
        check_origin(origin)
    except InvalidInputError as error:
        field = "secret" if error.message.startswith("a secret") else "location"
        raise InvalidInputError(field, error.message) from error
    host = urlsplit(origin.location).hostname or ""
    if origin.kind != "s3" and not allow_local and names_reserved_host(host):
        raise InvalidInputError(
            "location", f"'{host}' is the node's own or its cloud's; weights do not come from there"
        )
    if revision and (origin.kind != "hub" or not _is_revision(revision)):
        raise InvalidInputError("revision", "a hub's branch, tag or commit has letters, digits and ._/-")
    if len(files) > MAX_PATTERNS:
        raise InvalidInputError("files", f"{len(files):,} names; {MAX_PATTERNS:,} are allowed")
    for name in files:
        if not name or len(name) > MAX_PATTERN_CHARACTERS or not name.isprintable() or " " in name:
            raise InvalidInputError("files", f"'{name[:80]}' is no name or pattern of a file")


def _is_revision(text: str) -> bool:
    return len(text) <= MAX_REVISION and text.isascii() and all(c.isalnum() or c in "._/-" for c in text)


def lies_in_folder(source: str) -> bool:
    """Whether a model's source is a folder that replicas could start from."""
    return source.startswith("file:")


def check_origin(origin: Origin) -> None:
    """Refuse what no node could use, or what would give a secret away. Raises `InvalidInputError`."""
    schemes = SCHEMES.get(origin.kind)
    if schemes is None:
        raise InvalidInputError("origins", f"'{origin.kind}' is none of {', '.join(SCHEMES)}")
    try:
        parts = urlsplit(origin.location)
        parts.port  # noqa: B018 - raises for a port that is none
    except ValueError as error:
        raise InvalidInputError("origins", f"'{origin.location}' is no address") from error
    if parts.scheme not in schemes:
        raise InvalidInputError("origins", f"'{origin.location}' does not begin with {schemes[0]}://")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidInputError(
            "origins",
            "an address has no user, query or fragment here; name a secret of the nodes instead",
        )
    if bool(parts.netloc) == (origin.kind == "folder") or not parts.path.strip("/"):
        raise InvalidInputError("origins", f"'{origin.location}' names no place")
    if origin.secret and not _is_name(origin.secret):
        raise InvalidInputError(
            "origins", "a secret's name has letters, digits, dots, dashes and underscores"
        )


def _is_name(text: str) -> bool:
    return (
        len(text) <= MAX_SECRET_NAME
        and not text.startswith(".")
        and all(c.isalnum() or c in "._-" for c in text)
    )
