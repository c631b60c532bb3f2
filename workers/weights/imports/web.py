"""Asking web servers for facts rather than for weights: small answers, bounded, as JSON or as headers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec
import urllib3
from urllib3.exceptions import HTTPError, MaxRetryError, ProtocolError

from workers.weights.sources.answers import refusal, words
from workers.weights.sources.guard import ForbiddenPlaceError, pool_manager
from workers.weights.sources.port import RefusedError, SourceError

_MOST_BYTES = 32 * 1024 * 1024
_OK = 200
_PARTIAL = 206
_REDIRECTS = 5
_CHUNK_BYTES = 256 * 1024


class WebClient:
    """Connections to one server, with a token that only this server is told."""

    def __init__(self, location: str, *, token: str = "", allow_local: bool = False) -> None:
        parts = urlsplit(location)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SourceError(f"{location!r} is no http address")
        self.host = parts.netloc.rpartition("@")[2]
        self._origin = (parts.scheme, parts.netloc)
        self._headers: Mapping[str, str] = {"Authorization": f"Bearer {token}"} if token else {}
        self._pool = pool_manager(redirects=_REDIRECTS, allow_local=allow_local)

    def get_json(self, url: str, what: str) -> tuple[Any, str]:
        """Return what an address says, and the address of its next page, if there is one.

        Raises `SourceError`.
        """
        answer = self._get(url, what, {})
        try:
            if answer.status != _OK:
                raise refusal(answer, what)
            return self._decoded(answer, what), self._next_page(answer, what)
        finally:
            answer.close()

    def size_of(self, url: str, what: str) -> tuple[int, str]:
        """Size of a file in bytes, and what changes with its contents. Raises `SourceError`."""
        # Not HEAD, which some servers refuse or answer without a size.
        answer = self._get(url, what, {"Range": "bytes=0-0"})
        try:
            size = _told_size(answer)
            if size is None and answer.status in (_OK, _PARTIAL):
                raise SourceError(f"{what}: the server does not say how long it is")
            if size is None:
                raise refusal(answer, what)
            return size, answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
        finally:
            answer.close()

    def close(self) -> None:
        """Close all connections."""
        self._pool.clear()

    def _get(self, url: str, what: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        if urlsplit(url)[:2] != self._origin:
            raise RefusedError(f"{what}: the server sends on to another one for its own answers")
        asked = {**self._headers, "Accept-Encoding": "identity", **headers}
        try:
            return self._ask(url, asked)
        except ForbiddenPlaceError as error:
            raise RefusedError(f"{what}: {error}") from error
        except HTTPError as error:
            raise SourceError(f"{what}: {words(error)}") from error

    def _ask(self, url: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        try:
            return self._pool.request("GET", url, headers=headers, preload_content=False)
        except MaxRetryError as error:
            if not isinstance(error.reason, ProtocolError):
                raise
            # Servers close connections that were kept open just when they are used again; a new one tells.
            return self._pool.request("GET", url, headers=headers, preload_content=False)

    def _decoded(self, answer: urllib3.BaseHTTPResponse, what: str) -> Any:  # noqa: ANN401 - what a server says
        parts, length = [], 0
        try:
            while part := answer.read(_CHUNK_BYTES):
                parts.append(part)
                length += len(part)
                if length > _MOST_BYTES:
                    raise RefusedError(f"{what}: the answer is over {_MOST_BYTES:,} bytes")
        except HTTPError as error:
            raise SourceError(f"{what}: {words(error)}") from error
        try:
            return msgspec.json.decode(b"".join(parts))
        except (msgspec.DecodeError, RecursionError) as error:
            raise SourceError(f"{what}: the answer is no JSON") from error

    def _next_page(self, answer: urllib3.BaseHTTPResponse, what: str) -> str:
        for link in answer.headers.get("Link", "").split(","):
            address, _, rest = link.strip().partition(">")
            if 'rel="next"' in rest:
                url = address.lstrip("<")
                if urlsplit(url)[:2] != self._origin:
                    raise RefusedError(f"{what}: its next page is on another server")
                return url
        return ""


def _told_size(answer: urllib3.BaseHTTPResponse) -> int | None:
    if answer.status == _PARTIAL:
        told = answer.headers.get("Content-Range", "").rpartition("/")[2]
    elif answer.status == _OK:
        told = answer.headers.get("Content-Length", "")
    elif answer.headers.get("Content-Range", "").strip() == "bytes */0":
        told = "0"  # an empty file has no first byte to give
    else:
        return None
    with suppress(ValueError):
        return int(told)
    return None
