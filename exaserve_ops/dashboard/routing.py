"""Addresses of the sockets. Each guards its own handshake; the entry point adds the login."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from django.urls import path

from exaserve_ops.dashboard.live.handshake import GuardedSocket
from exaserve_ops.dashboard.live.sockets import live_socket, log_socket


async def refuse_unknown(
    _scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """No such socket: refuse the handshake, which is a 403, instead of failing on it."""
    await receive()
    await send({"type": "websocket.close", "code": 4404})


websocket_urlpatterns = [
    path(
        "ws/live/",
        GuardedSocket(live_socket, permissions=["inventory.view_node", "serving.view_replica"]),  # type: ignore[arg-type]  # ASGI, not a view
    ),
    path(
        "ws/replicas/<uuid:replica_id>/log/",
        GuardedSocket(log_socket, permissions=["serving.view_replica"]),  # type: ignore[arg-type]  # ASGI, not a view
    ),
]
