"""One line for each problem, never a flood, and never a line that a caller could have forged."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

WINDOW_SECONDS = 10.0
LINES_IN_WINDOW = 5

_UNSAFE = re.compile(r"[^A-Za-z0-9._:/\[\]%@+-]")
_LONGEST_VALUE = 160

_log = logging.getLogger("exaserve_ops.gateway")


@dataclass(slots=True)
class _Window:
    started_seconds: float
    lines: int = 0
    held_back: int = 0


class Problems:
    """Writes `event=… key=value` lines, a few for each kind of event in a window."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def report(self, event: str, now: float, **fields: object) -> None:
        """Say what went wrong. `event` is one of a fixed few; values lose what is unsafe."""
        window = self._windows.get(event)
        held_back = 0
        if window is None or now - window.started_seconds > WINDOW_SECONDS:
            held_back = window.held_back if window else 0
            window = self._windows[event] = _Window(now)
        window.lines += 1
        if window.lines > LINES_IN_WINDOW:
            window.held_back += 1
            return
        if held_back:
            fields["held_back"] = held_back
        text = " ".join(f"{name}={_safe(value)}" for name, value in fields.items())
        _log.warning("event=%s %s", event, text)


def _safe(value: object) -> str:
    return _UNSAFE.sub("_", str(value)[:_LONGEST_VALUE])
