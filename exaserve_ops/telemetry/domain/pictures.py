"""What travels from controllers to live pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The newest heartbeat of a node as its agent encoded it; whoever shows the node reads it."""

    received_at_seconds: float | None
    """Unix seconds."""
    sequence: int
    heartbeat: bytes


@dataclass(frozen=True, slots=True)
class LivePicture:
    """One second of the fleet, encoded for viewers."""

    sequence: int
    layout: bytes | None
    """Only where it changed."""
    frame: bytes
    summary: bytes
    nodes: Mapping[str, NodeReport] = field(default_factory=dict)
    """Only those that said something new."""
    gone_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A batch of lines of a replica's log; `position` orders entries and resumes a reader."""

    position: str
    attempt: int
    lines: tuple[str, ...]
    dropped_lines: int
