"""Which headers pass, and how the heads of both sides are built.

Hop-by-hop headers end here in both directions, whatever the client says in `Connection`. What would
let a client speak for somebody else (its own credentials, cookies, claims about its address) ends
here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case, in the order they came."""

_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"})
_NOT_TO_ENGINE = _HOP_BY_HOP | {
    b"accept-encoding",  # a compressed answer could be neither watched nor ended properly
    b"authorization",
    b"content-length",
    b"cookie",
    b"expect",
    b"forwarded",
    b"host",
    b"via",
    b"x-api-key",
    b"x-real-ip",
    b"x-request-id",
}
_NOT_TO_CLIENT = _HOP_BY_HOP | {
    b"alt-svc",
    b"content-length",
    b"set-cookie",
    b"www-authenticate",
    b"x-request-id",
}
_DROPPED_PREFIXES = (b"proxy-", b"x-forwarded-", b"x-exaops-")

_SESSION_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


def is_session_id(value: bytes) -> bool:
    """Whether a session id may be used as part of a key and in logs."""
    return _SESSION_ID.fullmatch(value) is not None


def is_request_id(value: bytes) -> bool:
    """Whether a caller's request id may be used as it is."""
    return _REQUEST_ID.fullmatch(value) is not None


def connection_names(headers: Headers) -> frozenset[bytes]:
    """Names that `Connection` headers declare to be for this hop only."""
    names = [
        name.strip().lower()
        for header, value in headers
        if header == b"connection"
        for name in value.split(b",")
    ]
    return frozenset(names)


def engine_head(prefix: bytes, headers: Headers, request_id: bytes, body_bytes: int) -> bytes:
    """Build the head that an engine gets; `prefix` is request line, host and token."""
    parts = [prefix]
    for name, value in _passing(headers, _NOT_TO_ENGINE):
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (request_id, body_bytes))
    return b"".join(parts)


def client_head(status: int, headers: Headers, ours: Iterable[bytes]) -> bytes:
    """Build the head that a client gets; `ours` are complete header lines."""
    parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status]
    for name, value in _passing(headers, _NOT_TO_CLIENT):
        parts += (name, b": ", value, b"\r\n")
    parts += ours
    parts.append(b"\r\n")
    return b"".join(parts)


def _passing(headers: Headers, dropped: frozenset[bytes]) -> Iterable[tuple[bytes, bytes]]:
    named = connection_names(headers)
    for pair in headers:
        name = pair[0]
        if name in dropped or name in named or name.startswith(_DROPPED_PREFIXES):
            continue
        yield pair
