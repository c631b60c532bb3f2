"""Who may open a socket, and keep it: a page of this origin with a login, or a program with an API key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from channels.auth import get_user
from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth.models import AbstractUser
from django.db import Error as DatabaseError
from django.http.request import validate_host

from exaserve_ops.access.models import Scope
from exaserve_ops.access.selectors import find_valid_key
from exaserve_ops.dashboard.live.tasks import until_first
from exaserve_ops.lib import clock

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 30.0
"""A login that ended, a key that was revoked or a right that was taken ends the socket this soon."""
NOT_ADMITTED = 4401

Connection = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Connection, Receive, Send], Coroutine[Any, Any, None]]


class GuardedSocket:
    """Refuses a handshake (403) before the socket behind it sees anything; says why in the log.

    A browser sends the user's cookie to whoever asks, so a cookie counts only together with an
    `Origin` of ours. No `Origin` is no browser: then an API key must be shown. What was shown is looked
    at again while the socket is open, and once it opens nothing any more, neither does the socket.
    """

    def __init__(self, socket: Application, *, permissions: Iterable[str]) -> None:
        self._socket = socket
        self._permissions = tuple(permissions)

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Let the socket run for as long as it may, or refuse."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        user, refusal = await self._admit(scope.get("user"), headers)
        if refusal:
            logger.warning("socket %s refused: %s", scope.get("path"), refusal)
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": NOT_ADMITTED, "reason": refusal})
            return
        ended: list[str] = []
        await until_first(
            self._socket(scope | {"user": user}, receive, send),
            self._watch(scope, headers, ended.append),
        )
        for reason in ended:
            logger.info("socket %s of %s ended: %s", scope.get("path"), user, reason)
            await send({"type": "websocket.close", "code": NOT_ADMITTED, "reason": reason})

    async def _watch(self, scope: Connection, headers: dict[bytes, str], say: Callable[[str], None]) -> None:
        """Return, and say why, once what was shown at the handshake no longer opens this socket."""
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            try:
                _, refusal = await self._admit(await _user_now(scope), headers)
            except DatabaseError:
                logger.warning("a socket could not be checked again; it stays for now", exc_info=True)
                continue
            if refusal:
                say(refusal)
                return

    async def _admit(self, user: Any, headers: dict[bytes, str]) -> tuple[Any, str]:  # noqa: ANN401 - users and strangers
        origin = headers.get(b"origin")
        if origin is not None:
            refusal = origin_refusal(origin, headers.get(b"host", ""))
        else:
            user, refusal = await _user_of_key(headers.get(b"authorization", ""))
        if refusal:
            return None, refusal
        if user is None or not user.is_authenticated:
            return None, "nobody is logged in"
        if not await database_sync_to_async(_has_permissions)(user, self._permissions):
            return None, f"{user} lacks {' or '.join(self._permissions)}"
        return user, ""


async def _user_now(scope: Connection) -> Any:  # noqa: ANN401 - users and strangers
    """Who the session of the handshake stands for now, read afresh."""
    session = scope.get("session")
    if session is None:
        return None
    store = import_module(settings.SESSION_ENGINE).SessionStore
    return await get_user({"session": store(session.session_key)})


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
