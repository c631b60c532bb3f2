"""Runs of one contestant on one network: who is started where, and what is measured."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.swarm.lan import Lan, Place, cpu_seconds

ORIGIN_PORT = 8000
_ROOT = Path(__file__).parents[2]
_STARTED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Weights:
    """What is sent: a folder with one file, and its manifest."""

    folder: Path
    manifest: Path
    total_bytes: int
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run took."""

    seconds: float
    """From the word to go until every node that should be is whole."""
    cpu_seconds: float
    """Of the processes on nodes and origin, all together."""
    origin_copies: float
    """Bytes that left the origin's link, headers and all, over the bytes of the weights."""
    first_seconds: float
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class NodeProcess:
    """A process on a node of the network, and the last that it told."""

    name: str
    place: Place
    folder: Path
    process: subprocess.Popen[str]
    port: int = 0
    status: dict[str, Any] = field(default_factory=dict)
    heard_at: float = 0.0
    whole_at: float = 0.0

    def tell(self, what: dict[str, Any]) -> None:
        """Send it a line."""
        assert self.process.stdin is not None  # noqa: S101 - it was started with a pipe
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it was killed, which is seen elsewhere

    def listen(self, total_bytes: int) -> None:
        """Read what it tells until it ends."""
        assert self.process.stdout is not None  # noqa: S101 - it was started with a pipe
        for line in self.process.stdout:
            told = json.loads(line)
            self.heard_at = time.monotonic()
            if "port" in told:
                self.port = told["port"]
                continue
            self.status = told
            if told["have"] == total_bytes and not self.whole_at:
                self.whole_at = self.heard_at

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.poll() is None


class Stage:
    """One network with an origin in its first place, and nodes in the others."""

    def __init__(self, lan: Lan, weights: Weights, folder: Path) -> None:
        self.lan = lan
        self.weights = weights
        self.folder = folder
        self.origin_place, *self.node_places = lan.places
        self.origin: subprocess.Popen[str] | None = None
        self.nodes: list[NodeProcess] = []

    def start_origin(self) -> None:
        """Start the HTTP origin, and wait until it listens."""
        arguments = [str(self.weights.folder), self.origin_place.address, str(ORIGIN_PORT)]
        self.origin = self._start(self.origin_place, "bench.swarm.origin", arguments)
        assert self.origin.stdout is not None  # noqa: S101 - it was started with a pipe
        self.origin.stdout.readline()

    def start_extra(self, module: str, place: Place, extra: Sequence[str]) -> None:
        """Start another process in a place, such as another kind of origin, and wait for its first line."""
        self.origin = self._start(place, module, ["--address", place.address, *extra])
        assert self.origin.stdout is not None  # noqa: S101 - it was started with a pipe
        self.origin.stdout.readline()
        # What it goes on to tell is read, and passed over, so that it never waits for the pipe.
        threading.Thread(target=self.origin.stdout.read, daemon=True).start()

    def start_nodes(self, module: str, extra: Callable[[int], Sequence[str]] = lambda _: ()) -> None:
        """Start a process in each place, and wait until all have told their port."""
        for number, place in enumerate(self.node_places):
            folder = self.folder / f"n{number:02d}"
            folder.mkdir(parents=True, exist_ok=True)
            arguments = [
                *("--node", f"n{number:02d}", "--address", place.address),
                *("--manifest", str(self.weights.manifest), "--folder", str(folder)),
                *("--origin", f"{self.origin_place.address}:{ORIGIN_PORT}"),
                *extra(number),
            ]
            process = self._start(place, module, arguments)
            node = NodeProcess(f"n{number:02d}", place, folder, process)
            self.nodes.append(node)
            threading.Thread(target=node.listen, args=(self.weights.total_bytes,), daemon=True).start()
        self.wait(lambda: all(node.port for node in self.nodes), _STARTED_SECONDS, "every node to start")

    def _start(self, place: Place, module: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
        command = place.command([sys.executable, "-m", module, *arguments])
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=_ROOT, bufsize=1)

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for something. Raises `TimeoutError` with what every node last told."""
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                told = "; ".join(f"{node.name}: {node.status}" for node in self.nodes)
                raise TimeoutError(f"waited {seconds:.0f} s for {what}; {told}")
            time.sleep(0.02)

    def cpu(self) -> float:
        """CPU seconds of all processes so far."""
        origin = [self.origin] if self.origin is not None else []
        return cpu_seconds([p.pid for p in (*origin, *(node.process for node in self.nodes))])

    def stop_origin(self) -> None:
        """Kill the origin."""
        if self.origin is not None:
            _end(self.origin)
            self.origin = None

    def stop(self) -> None:
        """End every process."""
        self.stop_origin()
        for node in self.nodes:
            _end(node.process)


@contextmanager
def staged(places: int, megabits: float, weights: Weights, folder: Path) -> Iterator[Stage]:
    """A network with this many nodes beside the origin, gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    with Lan(places + 1, megabits) as lan:
        stage = Stage(lan, weights, folder)
        try:
            yield stage
        finally:
            stage.stop()


def measure(stage: Stage, go: Callable[[], None], watch: Callable[[], bool], seconds: float) -> Outcome:
    """Say go and wait until it is done."""
    cpu, sent = stage.cpu(), stage.origin_place.sent_bytes()
    began = time.monotonic()
    go()
    stage.wait(watch, seconds, "every node to be whole")
    ends = [node.whole_at for node in stage.nodes if node.whole_at]
    return Outcome(
        seconds=max(ends) - began,
        cpu_seconds=stage.cpu() - cpu,
        origin_copies=(stage.origin_place.sent_bytes() - sent) / stage.weights.total_bytes,
        first_seconds=min(ends) - began,
    )


def give_keys(stage: Stage) -> None:
    """Make a key for this swarm, and tell its members."""
    key = secrets.token_hex(32)
    for node in stage.nodes:
        node.tell({"key": key})


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what it had not read yet
                pipe.close()
