"""What travels from controllers to live pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LivePicture:
    """One second of the fleet, encoded for viewers."""

    sequence: int
    layout: bytes | None
    """Only where it changed."""
    frame: bytes
    summary: bytes
    nodes: Mapping[str, bytes] = field(default_factory=dict)
    gone_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A batch of lines of a replica's log; `position` orders entries and resumes a reader."""

    position: str
    attempt: int
    lines: tuple[str, ...]
    dropped_lines: int
