"""ASGI entry: pages and REST over HTTP, live views over WebSocket, static files from disk."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "exaserve_ops.settings.dev")

from django.core.asgi import get_asgi_application

django_application = get_asgi_application()  # before anything that touches models

from channels.auth import AuthMiddlewareStack  # noqa: E402 - models must be loadable first
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402 - see above
from django.urls import re_path  # noqa: E402 - see above

from exaserve_ops.dashboard.routing import refuse_unknown, websocket_urlpatterns  # noqa: E402 - see above
from exaserve_ops.wiring import connect_pages  # noqa: E402 - see above

connect_pages()

unknown = re_path("", refuse_unknown)  # type: ignore[arg-type]  # ASGI, not a view

application = ProtocolTypeRouter(
    {
        "http": django_application,
        "websocket": AuthMiddlewareStack(URLRouter([*websocket_urlpatterns, unknown])),
    }
)
