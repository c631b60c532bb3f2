"""Who may open a socket: a page of this very origin with a login, or a program with an API key."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth.models import AbstractUser
from django.http.request import validate_host

from exaserve_ops.access.models import Scope
from exaserve_ops.access.selectors import find_valid_key
from exaserve_ops.lib import clock

logger = logging.getLogger(__name__)

Connection = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Connection, Receive, Send], Awaitable[None]]


class GuardedSocket:
    """Refuses a handshake (403) before the socket behind it sees anything; says why in the log.

    A browser sends the user's cookie to whoever asks, so a cookie counts only together with an
    `Origin` of ours. No `Origin` is no browser: then an API key must be shown.
    """

    def __init__(self, socket: Application, *, permissions: Iterable[str]) -> None:
        self._socket = socket
        self._permissions = tuple(permissions)

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Let the socket run, or refuse."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        user, refusal = await self._admit(scope, headers)
        if refusal:
            logger.warning("socket %s refused: %s", scope.get("path"), refusal)
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": 4401, "reason": refusal})
            return
        await self._socket(scope | {"user": user}, receive, send)

    async def _admit(self, scope: Connection, headers: dict[bytes, str]) -> tuple[Any, str]:
        origin = headers.get(b"origin")
        if origin is not None:
            refusal = origin_refusal(origin, headers.get(b"host", ""))
            user = scope.get("user")
        else:
            user, refusal = await _user_of_key(headers.get(b"authorization", ""))
        if refusal:
            return None, refusal
        if user is None or not user.is_authenticated:
            return None, "nobody is logged in"
        if not await database_sync_to_async(_has_permissions)(user, self._permissions):
            return None, f"{user} lacks {' or '.join(self._permissions)}"
        return user, ""


def origin_refusal(origin: str, host: str) -> str:
    """Why an origin may not open a socket; empty where it may.

    It must be the public address, or the very host and port that the request went to.
    """
    if origin == settings.ENV.origin:
        return ""
    parts = urlsplit(origin)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        return f"origin {origin[:200]!r} is no web address"
    hosts = settings.ALLOWED_HOSTS
    if parts.netloc.lower() == host.lower() and validate_host(parts.hostname or "", hosts):
        return ""
    return f"origin {origin[:200]!r} is foreign to {host[:200]!r}"


async def _user_of_key(authorization: str) -> tuple[Any, str]:
    scheme, _, text = authorization.partition(" ")
    if scheme.lower() != "bearer":
        return None, "no origin, and no API key either"
    key = await database_sync_to_async(find_valid_key)(text.strip(), Scope.API, now=clock.now())
    return (key.user, "") if key is not None else (None, "the API key opens nothing here")


def _has_permissions(user: AbstractUser, permissions: tuple[str, ...]) -> bool:
    return user.has_perms(permissions)
