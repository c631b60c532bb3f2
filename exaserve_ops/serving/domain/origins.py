"""Which places nodes can fetch weights from."""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.weights.domain.wanted import Origin
from workers.protocol.addresses import AddressError, names_reserved_host, parse_host_port

SCHEMES = {"folder": ("file",), "http": ("http", "https"), "hub": ("http", "https"), "s3": ("s3",)}
"""Schemes of the locations of each kind of origin."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_OWNER_AND_NAME = 2
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

    `allow_local`: hosts that mean the node itself are no fault.
    """
    if origin.kind not in IMPORT_KINDS:
        raise InvalidInputError("kind", f"'{origin.kind}' is none of {', '.join(IMPORT_KINDS)}")
    try:
        check_origin(origin, allow_local=allow_local)
        if origin.kind == "hub":
            _check_hub(origin.location)
    except InvalidInputError as error:
        field = "secret" if error.message.startswith("a secret") else "location"
        raise InvalidInputError(field, error.message) from error
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


def check_origin(origin: Origin, *, allow_local: bool = False) -> None:
    """Refuse what no node could use, or should ask, or gives a secret away. Raises `InvalidInputError`.

    `allow_local`: hosts that mean the node itself are no fault; its cloud's metadata service is always one.
    What a name stands for is looked at by the node, whenever it connects.
    """
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
    if parts.netloc:
        _check_host(origin.kind, parts.netloc, allow_local=allow_local)
    if origin.secret and not _is_name(origin.secret):
        raise InvalidInputError(
            "origins", "a secret's name has plain letters, digits, dots, dashes and underscores"
        )


def _check_host(kind: str, netloc: str, *, allow_local: bool) -> None:
    if kind == "s3":
        if not _BUCKET.fullmatch(netloc):
            raise InvalidInputError("origins", f"'{netloc}' is no name of a bucket")
        return
    host = netloc.rpartition(":")[0] if netloc.count(":") == 1 else netloc
    reserved = names_reserved_host(host, allow_loopback=allow_local)
    try:
        host = parse_host_port(netloc).host if not reserved else host
    except AddressError as error:
        raise InvalidInputError("origins", str(error)) from error
    if reserved or names_reserved_host(host, allow_loopback=allow_local):
        raise InvalidInputError(
            "origins", f"'{host}' is the node's own or its cloud's; weights do not come from there"
        )


def _check_hub(location: str) -> None:
    words = [word for word in urlsplit(location).path.split("/") if word]
    for mark in ("tree", "resolve"):
        if mark in words[_OWNER_AND_NAME:]:
            words = words[: words.index(mark, _OWNER_AND_NAME)]
    if len(words) != _OWNER_AND_NAME:
        raise InvalidInputError(
            "origins", f"'{location}' is no https://hub/owner/name (/tree/<revision> may follow)"
        )


def _is_name(text: str) -> bool:
    return (
        len(text) <= MAX_SECRET_NAME
        and text.isascii()
        and not text.startswith(".")
        and all(c.isalnum() or c in "._-" for c in text)
    )
