"""What an exchange needs of the client's connection."""

from __future__ import annotations

from typing import Protocol

from exaserve_ops.gateway.refusals import Refusal
from exaserve_ops.gateway.requests import Request


class Client(Protocol):
    """The client's side of the exchange."""

    is_paused: bool
    """The client takes less than it is sent."""

    def must_close(self, request: Request) -> bool:
        """Whether the connection ends with this answer."""

    def write(self, data: bytes) -> None:
        """Send bytes of the answer."""

    def refuse(self, request: Request, refusal: Refusal) -> None:
        """Send an error as the whole answer."""

    def finish(self, *, keep_alive: bool) -> None:
        """The answer is over; close after it unless kept alive."""

    def abort(self) -> None:
        """Cut the connection, so that the answer cannot be taken for a whole one."""
