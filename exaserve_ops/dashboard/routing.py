"""Addresses of the sockets. Each guards its own handshake; the entry point adds the login."""

from __future__ import annotations

from django.urls import path

from exaserve_ops.dashboard.live.handshake import GuardedSocket
from exaserve_ops.dashboard.live.sockets import live_socket, log_socket

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
