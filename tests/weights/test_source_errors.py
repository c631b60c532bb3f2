"""Why a place gives no weights is said in words, and no setting lets a node ask its cloud for credentials."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
import urllib3
from urllib3.exceptions import HTTPError
from urllib3.util import connection

from workers.weights.sources.answers import words
from workers.weights.sources.guard import ForbiddenPlaceError, pool_manager


def said_by(url: str, timeout_seconds: float = 5.0) -> str:
    pool = urllib3.PoolManager(retries=urllib3.Retry(0), timeout=timeout_seconds)
    with pytest.raises(HTTPError) as caught:
        pool.request("GET", url)
    pool.clear()
    return words(caught.value)


def test_refused_silent_and_unknown_hosts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/signed?key=x"
        assert said_by(address, 0.2).startswith("timed out")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        assert said_by(f"http://127.0.0.1:{deaf.getsockname()[1]}/x") == "connection refused"

    def knows_nobody(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", knows_nobody)
    assert said_by("http://nowhere.invalid/x").startswith("no such name")


class _Far:
    """A connection whose other end has this address."""

    def __init__(self, address: str) -> None:
        self.address, self.closed = address, False

    def getpeername(self) -> tuple[str, int]:
        return self.address, 80

    def close(self) -> None:
        self.closed = True


def connecting_to(far: _Far) -> Callable[..., _Far]:
    return lambda *_args, **_kwargs: far


@pytest.mark.parametrize("allow_local", [False, True])
@pytest.mark.parametrize("address", ["169.254.169.254", "169.254.7.7", "fe80::1%lo", "100.100.100.200"])
def test_what_is_link_local_is_never_asked_even_where_local_sources_are_allowed(
    monkeypatch: pytest.MonkeyPatch, address: str, allow_local: bool
) -> None:
    far = _Far(address)
    monkeypatch.setattr(connection, "create_connection", connecting_to(far))
    with pytest.raises(ForbiddenPlaceError, match="never come from there"):
        pool_manager(redirects=0, allow_local=allow_local).request("GET", "http://hub.example/x")
    assert far.closed
