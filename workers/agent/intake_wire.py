"""How the Celery child hands a command to the agent: one frame over a Unix socket, one answer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from workers.agent.home import Home
from workers.protocol.v1 import MAX_MESSAGE_BYTES

ENV_HOME = "EXAOPS_AGENT_HOME"
"""The only setting that the child is given: everything else is in the home folder."""
ENV_AGENT_PID = "EXAOPS_AGENT_PID"
"""Whose child it is: told rather than asked, since the agent may die before the child can ask."""

TIMEOUT_SECONDS = 20.0
_LENGTH_BYTES = 4
_MAX_ANSWER_BYTES = 4096


class IntakeError(Exception):
    """The agent could not be reached, or the frame was none."""


@contextmanager
def short_address(home: Home) -> Iterator[str]:
    """The socket's path by way of an open folder: a Unix socket's name is limited to 107 bytes."""
    folder = os.open(home.run, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{home.intake_socket.name}"
    finally:
        os.close(folder)


def send_command(home: Home, data: bytes) -> str:
    """Hand a command over and wait for the outcome. Raises `IntakeError`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(TIMEOUT_SECONDS)
        try:
            with short_address(home) as address:
                link.connect(address)
            link.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
            link.shutdown(socket.SHUT_WR)
            return _read_all(link, _MAX_ANSWER_BYTES).decode("utf-8", "replace")
        except OSError as error:
            raise IntakeError(f"agent not reached: {error.strerror or error}") from error


def receive_command(link: socket.socket) -> bytes:
    """Read one frame. Raises `IntakeError` if it is cut short or too long."""
    link.settimeout(TIMEOUT_SECONDS)
    length = int.from_bytes(_read_exactly(link, _LENGTH_BYTES), "big")
    if length > MAX_MESSAGE_BYTES:
        raise IntakeError(f"frame of {length} bytes")
    return _read_exactly(link, length)


def _read_exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = link.recv(count - len(data))
        if not part:
            raise IntakeError("frame cut short")
        data += part
    return data


def _read_all(link: socket.socket, limit: int) -> bytes:
    data = b""
    while len(data) < limit and (part := link.recv(limit)):
        data += part
    return data
