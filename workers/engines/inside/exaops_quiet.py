"""Keeps an engine's log readable: the agent asks for health and metrics each second, and each is a line.

Made to run inside of engines: standard library only.
"""

from __future__ import annotations

import logging

_ACCESS_LOG = "uvicorn.access"
_ASKED_OFTEN = ("/health", "/metrics")
_FIRST_ERROR_STATUS = 400
_FIELDS = 5
"""Client, method, path, HTTP version, status: what uvicorn says of a request."""


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a line of the access log is more than an answered question of the agent's."""
    told = record.args
    if not isinstance(told, tuple) or len(told) != _FIELDS:
        return True
    path, status = str(told[2]).partition("?")[0], told[4]
    return path not in _ASKED_OFTEN or not isinstance(status, int) or status >= _FIRST_ERROR_STATUS


def leave_polls_out() -> None:
    """Have the access log say nothing of them. A server that sets up its logging later keeps to it."""
    logging.getLogger(_ACCESS_LOG).addFilter(is_worth_a_line)
