"""A line to a store that a test can cut, hold and mend: a proxy between two Unix sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

_CHUNK_BYTES = 65_536


class Tap:
    """Forwards every connection to `target`, while the line is whole."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self._target = target
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._links: set[socket.socket] = set()
        self._flows = threading.Event()
        self._flows.set()
        self.mend()

    def cut(self) -> None:
        """End every connection and refuse new ones, as when the store is not running."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            self.path.unlink(missing_ok=True)
            _end(listener)
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            _end(link)

    def hold(self) -> None:
        """Let nothing through and end nothing, as when packets vanish on the way."""
        self._flows.clear()

    def mend(self) -> None:
        """Make the line whole again."""
        self._flows.set()
        with self._lock:
            if self._listener is not None:
                return
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(self.path))
            self._listener.listen(64)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    close = cut

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return  # cut
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(str(self._target))
            except OSError:
                near.close()
                far.close()
                continue
            with self._lock:
                if self._listener is not listener:
                    near.close()
                    far.close()
                    return
                self._links |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                self._flows.wait()
                sink.sendall(data)
        _end(source)
        _end(sink)
        with self._lock:
            self._links -= {source, sink}


def _end(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()
