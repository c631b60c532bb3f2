"""The wish that an agent end a process which it left behind. Its text is the command's id as well."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

_KIND = "end-process"


@dataclass(frozen=True, slots=True)
class EndWish:
    """One process of one node: the start time, in clock ticks, tells it from others with that pid."""

    node_id: str
    pid: int
    start_ticks: int

    def text(self) -> str:
        """A new wish in words that `parse_end_wish` reads."""
        return f"{_KIND}/{self.node_id}/{self.pid}/{self.start_ticks}/{uuid.uuid4()}"


def is_end_wish(text: str) -> bool:
    """Whether a command's id is that of such a wish."""
    return text.startswith(f"{_KIND}/")


def parse_end_wish(text: str) -> EndWish:
    """Read a wish. Raises `ValueError` for any other text."""
    kind, node_id, pid, start_ticks, _ = text.split("/")
    if kind != _KIND:
        raise ValueError(f"{text!r} asks for no process to be ended")
    return EndWish(str(uuid.UUID(node_id)), int(pid), int(start_ticks))
