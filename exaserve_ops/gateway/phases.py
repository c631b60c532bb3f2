"""How far a request has come."""

from __future__ import annotations

import enum


class Phase(enum.IntEnum):
    """How far a request has come."""

    ROUTING = 0
    WAITING = 1
    CONNECTING = 2
    SENT = 3
    ANSWERED = 4
    """The answer's head was read."""
    ENDED = 5
