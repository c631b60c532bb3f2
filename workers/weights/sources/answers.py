"""What answers of HTTP servers mean for whoever fetches weights there."""

from __future__ import annotations

import os
import ssl

import urllib3
from urllib3.exceptions import (
    HTTPError,
    LocationValueError,
    MaxRetryError,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    ResponseError,
    SSLError,
    TimeoutError,  # noqa: A004 - of the HTTP library
)

from workers.weights.sources.port import BusyError, MissingFileError, RefusedError, SourceError

_MISSING = frozenset({404, 410, 416})
_REFUSED = frozenset({401, 403, 451})
_BUSY = frozenset({429, 503})
_USUAL_REST_SECONDS = 5.0
_LONGEST_REST_SECONDS = 300.0

_WORDS: tuple[tuple[type[Exception], str], ...] = (
    (NameResolutionError, "no such name: this node's resolver knows no address of that host"),
    (NewConnectionError, "no connection came about"),  # the library counts it among what timed out
    (TimeoutError, "timed out: nothing came in time"),
    (SSLError, "TLS failed: its certificate or its protocol is not accepted"),
    (ProtocolError, "the server broke the connection off"),
    (ResponseError, "the server redirects without end"),
    (LocationValueError, "it leads to an address that is none"),
)
"""Faults of connections that need no errno to be told."""

_HUB_WORDS = {
    "GatedRepo": "it is gated: have its owner let you in, and name a secret with a token of that account",
    "RepoNotFound": "there is no such model, or it is private: check the name, or name a secret with a token",
    "RevisionNotFound": "it has no such revision",
    "EntryNotFound": "it has no such file in that revision",
    "DisabledRepo": "the hub has disabled it",
}
"""What hubs say in `X-Error-Code`."""


def refusal(answer: urllib3.BaseHTTPResponse, what: str) -> SourceError:
    """Say why a server does not give `what`, and what would help."""
    status = answer.status
    told = _HUB_WORDS.get(answer.headers.get("X-Error-Code", ""), "")
    said = f"{what}: the server answers {status}{'; ' if told else ''}{told}"
    if status in _REFUSED:
        return RefusedError(said if told else f"{said}; its secret is missing or not good enough")
    if status in _MISSING:
        return MissingFileError(said)
    if status in _BUSY:
        rest = busy_seconds(answer.headers.get("Retry-After", ""))
        return BusyError(f"{said} and asks for a rest of {rest:.0f} s", rest)
    return SourceError(said)


def busy_seconds(retry_after: str) -> float:
    """How long to leave a server alone. A date instead of seconds counts as not told: clocks differ."""
    told = retry_after.strip()
    seconds = float(told) if told.isascii() and told.isdecimal() else _USUAL_REST_SECONDS
    return min(max(seconds, 1.0), _LONGEST_REST_SECONDS)


def words(error: Exception) -> str:
    """What went wrong, without the address, which a redirect may have given a signature."""
    if isinstance(error, MaxRetryError) and error.reason is not None:
        error = error.reason
    cause = error.__cause__ if isinstance(error, HTTPError) else error
    if isinstance(cause, OSError) and cause.errno and cause.errno > 0 and not isinstance(cause, ssl.SSLError):
        return os.strerror(cause.errno).lower()
    told = next((told for kind, told in _WORDS if isinstance(error, kind)), "")
    return told or f"the connection failed ({type(error).__name__})"
