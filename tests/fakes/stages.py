"""Stages of the built-in engine as processes of their own, forked off one that has torch already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import httpx

from workers.protocol import names

API_KEY, GANG_KEY = "xe-of-the-head", "xg-of-this-start"
MODEL_NAME = "demo"
_PRELOAD = (
    "workers.engines.torch_engine.__main__",
    "workers.engines.torch_engine.loading",
    "workers.engines.openai_server.serve",
)
_WAIT_SECONDS = 90.0
_SILENCE_SECONDS = 60.0
"""For stages that no test has stand still: a busy machine is not to end them."""


class HeldPort:
    """A port that nobody but a server that knows it gets, until `close`.

    The socket stays bound, so the kernel gives its port to nobody who asks for any. It never listens, so a
    server that may reuse addresses (`SO_REUSEADDR`) can, as often as it likes.
    """

    def __init__(self) -> None:
        """Hold a port of the loopback address."""
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.number: int = self._holder.getsockname()[1]

    def close(self) -> None:
        """Let it go."""
        self._holder.close()


@contextmanager
def held_port() -> Iterator[int]:
    """Yield the number of a port that is held for the block."""
    with closing(HeldPort()) as port:
        yield port.number


def run_engine(arguments: list[str], environment: dict[str, str], log_path: str) -> None:
    """What a process does: the engine's own main, with a log file of its own."""
    from workers.engines.torch_engine.__main__ import exit_at_once, main  # noqa: PLC0415 - in the fork

    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.environ.update(environment)
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    exit_at_once(status)


@dataclass
class StageProcess:
    """One stage."""

    process: ForkServerProcess
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text("utf-8") if self.log_path.exists() else ""

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> int:
        """Wait for the end; returns the exit status."""
        self.process.join(_WAIT_SECONDS)
        assert self.process.exitcode is not None, self.log()
        return self.process.exitcode


@dataclass
class StagedReplica:
    """All stages of a replica; `stages[0]` answers HTTP."""

    address: str
    stages: list[StageProcess] = field(default_factory=list)

    def client(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {API_KEY}"}
        return httpx.Client(base_url=f"http://{self.address}", headers=headers, timeout=60.0)

    def health(self) -> int:
        """Status of /health; 0 where nobody answers."""
        with self.client() as client:
            try:
                return client.get("/health").status_code
            except httpx.TransportError:
                return 0

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            for stage in self.stages:
                assert stage.process.exitcode is None, stage.log()
            return self.health() == 200

        wait_until(is_ready)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {_WAIT_SECONDS} s"
        time.sleep(0.01)


class StageForks:
    """Starts replicas, and ends all that it started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_PRELOAD))
        self._started: list[StageProcess] = []
        self._ports: list[HeldPort] = []

    def start(
        self, model_dir: Path, stages: int, *, keys: dict[int, str] | None = None, **flags: object
    ) -> StagedReplica:
        """Start all stages at once; `keys`: of stages that have another than the rest."""
        http, rendezvous = self._hold_port(), self._hold_port()
        replica = StagedReplica(f"127.0.0.1:{http}")
        for number in range(stages):
            own = [] if stages == 1 else [f"--stage={number}", f"--rendezvous=127.0.0.1:{rendezvous}"]
            common = {"port": http, "threads": 1, "device": "cpu", "pipeline_stages": stages}
            common |= {"silence_seconds": _SILENCE_SECONDS, **flags}
            arguments = [
                f"--model-dir={model_dir}",
                f"--served-model-name={MODEL_NAME}",
                *own,
                *(f"--{name.replace('_', '-')}={value}" for name, value in common.items()),
            ]
            key = (keys or {}).get(number, GANG_KEY)
            environment = {names.ENV_ENGINE_API_KEY: API_KEY, names.ENV_GANG_KEY: key}
            replica.stages.append(self._fork(arguments, environment))
        return replica

    def _hold_port(self) -> int:
        port = HeldPort()
        self._ports.append(port)
        return port.number

    def _fork(self, arguments: list[str], environment: dict[str, str]) -> StageProcess:
        log_path = self._folder / f"stage-{len(self._started)}.log"
        process = self._context.Process(target=run_engine, args=(arguments, environment, str(log_path)))
        process.start()
        started = StageProcess(process, log_path)
        self._started.append(started)
        return started

    def close(self) -> None:
        """Kill what still lives."""
        for started in self._started:
            started.process.kill()
        for started in self._started:
            started.process.join(_WAIT_SECONDS)
        for port in self._ports:
            port.close()


@contextmanager
def stage_forks(folder: Path) -> Iterator[StageForks]:
    """Yield a starter of replicas; all of them end with the block."""
    forks = StageForks(folder)
    try:
        yield forks
    finally:
        forks.close()
