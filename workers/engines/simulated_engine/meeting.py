"""Members of a simulated replica over several nodes: they meet, and each ends when another does.

What a real engine's collectives do, without tensors: every member holds a connection to the head for as
long as it lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time

EXIT_ALONE = 1
_PAUSE_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_GREETING_BYTES = 8

log = logging.getLogger(__name__)


class Meeting:
    """The head's end. Ends this process as soon as a member that had come is gone."""

    def __init__(self, host: str, port: int, members: int) -> None:
        """Listen at once. `members`: how many are awaited beside the head. Raises `OSError`."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._members = members
        self._lock = threading.Lock()
        self._come: set[int] = set()
        threading.Thread(target=self._accept, name="meeting", daemon=True).start()

    @property
    def is_complete(self) -> bool:
        """Whether all have come."""
        with self._lock:
            return len(self._come) >= self._members

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._hold, args=(connection,), daemon=True).start()

    def _hold(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            number = int(connection.recv(_GREETING_BYTES))
            with self._lock:
                self._come.add(number)
            log.info("member %d has come (simulated)", number)
            while connection.recv(_GREETING_BYTES):
                pass
            log.error("member %d is gone: the simulated replica ends", number)
            os._exit(EXIT_ALONE)


def follow(number: int, host: str, port: int) -> int:
    """Be a member until the head is gone. Returns the exit status."""
    with _reach(host, port) as head, contextlib.suppress(OSError):
        head.settimeout(None)
        head.sendall(str(number).encode())
        log.info("member %d has met its head (simulated)", number)
        while head.recv(_GREETING_BYTES):
            pass
    log.error("the head is gone: member %d ends (simulated)", number)
    return EXIT_ALONE


def _reach(host: str, port: int) -> socket.socket:
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        time.sleep(_PAUSE_SECONDS)  # the head has yet to listen
