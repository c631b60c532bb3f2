"""How the agent talks to Redis: every wait bounded, and one URL for both of its clients."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.retry import Retry

SOCKET_SECONDS = 3.0
_HEALTH_CHECK_SECONDS = 10


def connect(url: str, on_connect: Callable[[], None]) -> Redis:
    """Return a client that gives up on a dead connection after seconds and never retries itself.

    Opens nothing yet. The caller decides when to try again. `on_connect` is called for every
    connection made, since the client replaces one that the server closed without a word.
    """

    def greet(connection: AbstractConnection) -> None:
        connection.on_connect()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        on_connect()

    options: dict[str, Any] = {
        "socket_timeout": SOCKET_SECONDS,
        "socket_connect_timeout": SOCKET_SECONDS,
        "health_check_interval": _HEALTH_CHECK_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "redis_connect_func": greet,
    }
    if urlsplit(url).scheme == "unix":
        del options["socket_connect_timeout"]
    else:
        options["socket_keepalive"] = True
    return Redis.from_url(url, **options)


def kombu_url(url: str) -> str:
    """The same address as Celery's transport spells it: `unix://` is `redis+socket://` there."""
    parts = urlsplit(url)
    if parts.scheme != "unix":
        return url
    database = parse_qs(parts.query).get("db", ["0"])[0]
    credentials, at, _host = parts.netloc.rpartition("@")
    return f"redis+socket://{credentials}{at}{parts.path}?virtual_host={database}"


def kombu_options(url: str) -> dict[str, Any]:
    """Transport options of the command consumer: no wait without an end."""
    options: dict[str, Any] = {
        "socket_timeout": 10.0,  # longer than the consumer's blocking read, or it would never rest
        "socket_connect_timeout": SOCKET_SECONDS,
        "health_check_interval": _HEALTH_CHECK_SECONDS,
        # What a killed intake had taken is said again by the next wish, seconds later. Keeping account of
        # it in Redis would need keys that all nodes share, and a Lua script.
        "ack_emulation": False,
        # Commands all have the same priority: one list a queue instead of four to wait on.
        "priority_steps": [0],
        "retry_on_timeout": False,
        "max_retries": 3,
    }
    if urlsplit(url).scheme == "unix":
        del options["socket_connect_timeout"]
    else:
        options["socket_keepalive"] = True
    return options


def kombu_ssl(url: str) -> dict[str, Any] | None:
    """Certificate checks for `rediss://`, which Celery demands to be told; `None` for others."""
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED} if urlsplit(url).scheme == "rediss" else None
