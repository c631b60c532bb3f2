"""A WebSocket client that speaks ASGI to an application directly.

`channels.testing` has one too, but importing it needs daphne, which the product does not use.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from asgiref.testing import ApplicationCommunicator

DEADLINE_SECONDS = 10


class SocketClient(ApplicationCommunicator):
    """Opens a socket, sends text, and hands out what the application sends."""

    def __init__(
        self,
        application: Any,
        address: str,
        *,
        user: Any,
        headers: list[tuple[bytes, bytes]],
        session: Any = None,
    ) -> None:
        parts = urlsplit(address)
        scope = {
            "type": "websocket",
            "path": parts.path,
            "query_string": parts.query.encode(),
            "headers": headers,
            "subprotocols": [],
            "user": user,
            "session": session,
        }
        super().__init__(application, scope)

    async def connect(self) -> tuple[bool, int | None]:
        """Return whether the handshake was accepted, and the close code where it was not."""
        await self.send_input({"type": "websocket.connect"})
        answer = await self.receive_output(DEADLINE_SECONDS)
        return answer["type"] == "websocket.accept", answer.get("code")

    async def send_text(self, text: str) -> None:
        await self.send_input({"type": "websocket.receive", "text": text})

    async def disconnect(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wait(DEADLINE_SECONDS)
