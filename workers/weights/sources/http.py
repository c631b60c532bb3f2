"""HTTP(S) servers that give ranges, and hubs: files below an address, by kept connections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import quote, urlsplit

import urllib3
from urllib3.exceptions import HTTPError

from workers.weights.sources.answers import refusal, words
from workers.weights.sources.guard import ForbiddenPlaceError, pool_manager
from workers.weights.sources.port import NoRangesError, OtherSizeError, RefusedError, SourceError

_REDIRECTS = 5
_PARTIAL, _WHOLE = 206, 200


class BodyReader:
    """Bytes of one answer."""

    def __init__(self, answer: urllib3.BaseHTTPResponse, what: str) -> None:
        self._answer = answer
        self._what = what

    def read_into(self, memory: memoryview, /) -> None:
        """Fill memory with the next bytes. Raises `SourceError` if they end before."""
        view = memory
        try:
            while view:
                count = self._answer.readinto(view)
                if not count:
                    raise SourceError(f"{self._what} ended early")
                view = view[count:]
        except (HTTPError, OSError) as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"{self._what}: {words(error)}") from error


class HttpSource:
    """Implements the port for an address that files lie below."""

    def __init__(
        self, location: str, *, kind: str = "http", token: str = "", allow_local: bool = False
    ) -> None:
        parts = urlsplit(location)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SourceError(f"{location!r} is no http address")
        self.kind = kind
        self.name = parts.netloc.rpartition("@")[2]
        self._base = location.rstrip("/")
        self._headers: Mapping[str, str] = {"Authorization": f"Bearer {token}"} if token else {}
        self._pool = pool_manager(redirects=_REDIRECTS, allow_local=allow_local)

    @contextmanager
    def open_range(self, path: str, offset: int, length: int) -> Iterator[BodyReader]:
        """Ask for a range of a file. Raises `SourceError`."""
        what = f"{self.name}/{path}"
        headers = {**self._headers, "Accept-Encoding": "identity"}
        if length:
            headers["Range"] = f"bytes={offset}-{offset + length - 1}"
        try:
            answer = self._pool.request(
                "GET", f"{self._base}/{quote(path)}", headers=headers, preload_content=False
            )
        except ForbiddenPlaceError as error:
            raise RefusedError(f"{what}: {error}") from error
        except HTTPError as error:
            raise SourceError(f"{what}: {words(error)}") from error
        try:
            _check(answer, what, offset, length)
            yield BodyReader(answer, what)
        finally:
            give_back(answer)

    def close(self) -> None:
        """Close all connections."""
        self._pool.clear()


def give_back(answer: urllib3.BaseHTTPResponse) -> None:
    """Keep the connection for the next request if nothing of this answer is left in it."""
    if answer.length_remaining == 0:
        answer.release_conn()
    else:
        answer.close()


def _check(answer: urllib3.BaseHTTPResponse, what: str, offset: int, length: int) -> None:
    status = answer.status
    if status == _WHOLE and offset == 0:
        return  # a server without ranges gives all of it; what is too much is not read
    if status == _WHOLE:
        raise NoRangesError(f"{what}: the server gives no ranges")
    if status != _PARTIAL:
        raise refusal(answer, what)
    said = answer.headers.get("Content-Range", "")
    if not said.startswith(f"bytes {offset}-{offset + length - 1}/"):
        raise OtherSizeError(f"{what}: asked for {length:,} bytes from {offset:,} on, offered {said[:60]!r}")
