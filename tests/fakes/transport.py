"""A connection's other half in memory: what is written to it is kept."""

from __future__ import annotations

import asyncio
from typing import Any


class MemoryTransport(asyncio.Transport):
    """Takes everything at once; the test plays the peer."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 4711)})
        self.written = bytearray()
        self.is_cut = False
        self.is_ended = False

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.is_ended = True

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.is_cut

    def close(self) -> None:
        self.is_cut = True

    def abort(self) -> None:
        self.is_cut = True

    def pause_reading(self) -> None:
        """Nothing is read here by itself."""

    def resume_reading(self) -> None:
        """Nothing is read here by itself."""

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""
