from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from workers.engines.base import EngineAdapter, EngineSample, LaunchContext
from workers.engines.demo_model import make_demo_model
from workers.engines.registry import ENGINES
from workers.protocol import names

MODEL_NAME = "demo"
READY_SECONDS = 60.0


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "demo"
    make_demo_model(folder)
    return folder


def wait_until(condition: Callable[[], object], *, seconds: float = 20.0) -> None:
    """Wait for a condition; fails with the condition's source line when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


@dataclass
class EngineProcess:
    """A real engine process, launched the way the agent launches it."""

    adapter: EngineAdapter
    process: subprocess.Popen[bytes]
    address: str
    api_key: str
    log_path: Path

    def client(self, *, with_key: bool = True) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.api_key}"} if with_key else {}
        return httpx.Client(base_url=f"http://{self.address}", headers=headers, timeout=60.0)

    def log(self) -> str:
        return self.log_path.read_text("utf-8")

    def health(self) -> httpx.Response | None:
        with self.client(with_key=False) as client:
            try:
                return client.get(self.adapter.health_path)
            except httpx.TransportError:
                return None

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log()
            answer = self.health()
            return answer is not None and answer.status_code == 200

        wait_until(is_ready, seconds=READY_SECONDS)

    def sample(self) -> EngineSample:
        with self.client() as client:
            return self.adapter.parse_metrics(client.get(self.adapter.metrics_path).text)

    def metric(self, name: str) -> float:
        """One unlabelled or fully spelled series of the page, as a number."""
        with self.client() as client:
            page = client.get(self.adapter.metrics_path).text
        lines = [line for line in page.splitlines() if line.startswith(name + " ")]
        assert len(lines) == 1, f"{name}: {lines}"
        return float(lines[0].rpartition(" ")[2])

    def end(self) -> int:
        """Terminate, then kill if need be; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(timeout=15)


StartEngine = Callable[..., EngineProcess]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def engine_starter(
    folder: Path,
    *,
    kv_pool_dir: Path | None = None,
    kv_disk_dir: Path | None = None,
    holder: Path | None = None,
) -> Iterator[StartEngine]:
    """Yield a function that starts engines; all of them end with the block."""
    started: list[EngineProcess] = []

    def start(
        engine: str,
        model_dir: Path,
        *,
        port: int | None = None,
        api_key: str | None = None,
        **options: object,
    ) -> EngineProcess:
        number = len(started)
        runtime = folder / f"run-{number}"
        runtime.mkdir(mode=0o700)
        context = LaunchContext(
            replica_id=f"r{number}",
            attempt=1,
            served_model_name=MODEL_NAME,
            model_dir=model_dir,
            host="127.0.0.1",
            ports=(port or free_port(),),
            api_key=secrets.token_hex(8) if api_key is None else api_key,
            runtime_dir=runtime,
            kv_pool_dir=kv_pool_dir,
            kv_disk_dir=kv_disk_dir,
            holder=holder,
        )
        adapter = ENGINES[engine]
        launch = adapter.build_launch(options, context)  # type: ignore[arg-type]  # options are the test's
        log_path = folder / f"engine-{number}.log"
        with log_path.open("wb") as log:
            label = {names.ENV_REPLICA: context.replica_id, names.ENV_ATTEMPT: "1"}
            process = subprocess.Popen(
                launch.argv, env={**launch.env, **label}, stdout=log, stderr=log, cwd=runtime
            )
        address = f"127.0.0.1:{context.ports[0]}"
        running = EngineProcess(adapter, process, address, context.api_key, log_path)
        started.append(running)
        return running

    try:
        yield start
    finally:
        for running in started:
            running.end()


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    with engine_starter(tmp_path) as start:
        yield start


@pytest.fixture(scope="module", params=["torch", "simulated"])
def server(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """One ready engine of each kind, shared by a module's tests."""
    options: dict[str, dict[str, object]] = {
        "torch": {"num_blocks": 512},
        "simulated": {"kv_blocks": 512, "ttft_ms": 5, "itl_ms": 2},
    }
    with engine_starter(tmp_path_factory.mktemp("server")) as start:
        running = start(request.param, demo_model, **options[request.param])
        running.wait_ready()
        yield running


@pytest.fixture
def client(server: EngineProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
