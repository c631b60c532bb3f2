"""Which places nodes can fetch weights from."""

from __future__ import annotations

from urllib.parse import urlsplit

from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.weights.domain.wanted import Origin

SCHEMES = {"folder": ("file",), "http": ("http", "https"), "hub": ("http", "https"), "s3": ("s3",)}
"""Schemes of the locations of each kind of origin."""
MAX_ORIGINS = 8
MAX_SECRET_NAME = 64


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
