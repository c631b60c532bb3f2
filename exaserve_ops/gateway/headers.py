"""Which headers pass, and how the heads of both sides are built.

Hop-by-hop headers end here in both directions, whatever the client says in `Connection`. What would
let a client speak for somebody else (its own credentials, cookies, claims about its address) ends
here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import NamedTuple

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
    b"x-continue-stream",
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
FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")
TRAFFIC_CLASS = b"x-traffic-class"
CONTINUE = b"x-continue-stream"
_UNDERSTOOD = frozenset(
    {
        b"authorization",
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"transfer-encoding",
        b"x-request-id",
        TRAFFIC_CLASS,
        CONTINUE,
        *FORWARDED,
    }
)
_LONE = frozenset({b"close", b"keep-alive"})
_MOST_ROLES = 1024
"""Clients choose names, so what is remembered of them is bounded."""

_SESSION_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_HEADER_NAME = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


class Role(NamedTuple):
    """What becomes of a request's header of one name."""

    name: bytes
    """In lower case."""
    prefix: bytes
    """Start of the line that goes to the engine; empty where none does."""
    is_understood: bool
    """Whether the gateway itself wants its value."""


class Roles(dict[bytes, Role]):
    """Roles by name, in any case of letters; found out once for each."""

    def __init__(self, session_headers: Sequence[bytes]) -> None:
        super().__init__()
        self._understood = _UNDERSTOOD | frozenset(session_headers)

    def __missing__(self, given: bytes) -> Role:
        name = given.lower()
        passes = name not in _NOT_TO_ENGINE and not name.startswith(_DROPPED_PREFIXES)
        role = Role(name, name + b": " if passes else b"", name in self._understood)
        if len(self) >= _MOST_ROLES:
            self.clear()
        self[given] = role
        return role


def is_session_id(value: bytes) -> bool:
    """Whether a session id may be used as part of a key and in logs."""
    return _SESSION_ID.fullmatch(value) is not None


def may_name_session(name: bytes) -> bool:
    """Whether a header may carry session ids: it is one, in lower case, that says nothing else here."""
    is_taken = name in _UNDERSTOOD or name in _NOT_TO_ENGINE or name.startswith(_DROPPED_PREFIXES)
    return _HEADER_NAME.fullmatch(name) is not None and not is_taken


def is_request_id(value: bytes) -> bool:
    """Whether a caller's request id may be used as it is."""
    return _REQUEST_ID.fullmatch(value) is not None


def without_named(lines: list[bytes], connection: bytes) -> list[bytes]:
    """Drop the lines that a `Connection` header declares to be for this hop only."""
    if connection.lower() in _LONE:
        return lines
    named = _names(connection)
    return [line for line in lines if line.partition(b":")[0] not in named]


def engine_head(
    path: bytes, prefix: bytes, lines: Sequence[bytes], request_id: bytes, body_bytes: int
) -> bytes:
    """Build the head that an engine gets; `prefix` is the rest of the request line, host and token."""
    return b"POST %b%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
        path,
        prefix,
        b"".join(lines),
        request_id,
        body_bytes,
    )


def client_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Lines of an engine's answer that the client gets. Names are in lower case."""
    headers = list(headers)
    named = _names(b",".join(value for name, value in headers if name == b"connection"))
    dropped = _NOT_TO_CLIENT | named
    return b"".join(
        b"%b: %b\r\n" % (name, value)
        for name, value in headers
        if name not in dropped and not name.startswith(_DROPPED_PREFIXES)
    )


def status_line(status: int) -> bytes:
    """First line of an answer."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


def _names(connection: bytes) -> frozenset[bytes]:
    return frozenset(name.strip().lower() for name in connection.split(b","))
