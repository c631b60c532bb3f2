"""Controllers as processes of their own, on the test's database and store, and a simulated fleet."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from django.db import connection

from exaserve_ops.health.models import LeaderLease
from exaserve_ops.inventory.models import FailureDomain, Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment
from tests.fakes.fleet import FLEET_SECRET, GIB
from tests.fakes.node import wait_for
from tests.fakes.tap import Tap
from workers.protocol import digests
from workers.simulation.config import SimulationConfig
from workers.simulation.faults import Fault
from workers.simulation.node import ENGINE, NodeIdentity
from workers.simulation.process import Simulation

CODE = Path(__file__).resolve().parents[2]


@dataclass
class Controller:
    """One `run_controllers` process."""

    process: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def leads(self) -> bool:
        """Whether its lease stands, by the clock of Postgres."""
        row = LeaderLease.objects.first()
        is_ours = row is not None and row.holder.endswith(f"-{self.process.pid}")
        return is_ours and row is not None and row.expires_at > clock.now()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@dataclass
class ControlPlane:
    """Starts controllers; their lines to Postgres and Redis run through taps."""

    folder: Path
    sockets: Path
    controllers: list[Controller] = field(default_factory=list)
    postgres: Tap = field(init=False)
    redis: Tap = field(init=False)

    def __post_init__(self) -> None:
        connection.ensure_connection()
        info = connection.connection.info
        name = f".s.PGSQL.{info.port}"
        self.postgres = Tap(self.sockets / name, Path(info.host) / name)
        self.redis = Tap(self.sockets / "redis", Path(urlsplit(os.environ["REDIS_URL"]).path))
        self._database_url = (
            f"postgresql:///{info.dbname}?host={self.sockets}&port={info.port}"
            f"&user={info.user}&password={info.password}"
        )

    @property
    def redis_url(self) -> str:
        return f"unix://{self.redis.path}?db=0"

    def start(self) -> Controller:
        log = self.folder / f"controllers-{len(self.controllers)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "manage.py", "run_controllers"],
                cwd=CODE,
                env=os.environ
                | {
                    "DJANGO_SETTINGS_MODULE": "exaserve_ops.settings.prod",
                    "DATABASE_URL": self._database_url,
                    "REDIS_URL": self.redis_url,
                    "EXAOPS_FLEET_SECRET": FLEET_SECRET.hex(),
                    "EXAOPS_SECRET_KEY": "k" * 60,
                    "EXAOPS_VAR_DIR": str(self.folder),
                },
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )
        self.controllers.append(Controller(process, log))
        return self.controllers[-1]

    def start_leader(self) -> Controller:
        controller = self.start()
        wait_for(controller.leads, f"{controller.log} to lead", seconds=40)
        return controller

    def end(self) -> None:
        self.postgres.mend()
        self.redis.mend()
        for controller in self.controllers:
            controller.end()
        self.postgres.close()
        self.redis.close()


class PaperNodes:
    """Simulated nodes in a thread of the test, which can be silenced and heard again."""

    def __init__(
        self, redis_url: str, *, count: int = 6, racks: int = 2, faults: Iterable[Fault] = ()
    ) -> None:
        self.names = [f"sim-{index}" for index in range(count)]
        identities = []
        for index, name in enumerate(self.names):
            domain, _ = FailureDomain.objects.get_or_create(kind="host", name=name)
            node = Node.objects.create(pk=uuid.uuid4(), name=name, failure_domain=domain)
            key = digests.node_key(FLEET_SECRET, str(node.pk), 1)
            identities.append(
                NodeIdentity(
                    name=name,
                    node_id=str(node.pk),
                    node_key=key.hex(),
                    rack=f"r{index % racks}",
                    supernode="s0",
                    address=f"127.101.0.{index + 1}",
                )
            )
        config = SimulationConfig(
            redis_url=redis_url, seed=7, nodes=tuple(identities), slots=4, faults=tuple(faults)
        )
        self.simulation = Simulation(config)
        self._thread = threading.Thread(target=self.simulation.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        wait_for(lambda: set(self.liveness().values()) == {"alive"}, "all nodes to be alive", seconds=30)

    def stop(self) -> None:
        self.simulation.stop()
        self._thread.join(10)

    def silence(self, names: Iterable[str]) -> None:
        """Cut these off: neither reports nor pulses nor commands pass."""
        with self.simulation.lock:
            for name in names:
                self.simulation.fleet._by_name[name].cut += 1

    def restore(self, names: Iterable[str]) -> None:
        with self.simulation.lock:
            for name in names:
                self.simulation.fleet._by_name[name].cut -= 1

    def epoch(self, name: str) -> int:
        """The lease that a node believes in."""
        return self.simulation.fleet.node(name).lease_epoch

    @staticmethod
    def liveness() -> dict[str, str]:
        return dict(Node.objects.values_list("name", "liveness"))


def deploy(replicas: int, name: str = "chat") -> Deployment:
    """A deployment that only simulated nodes can run."""
    model, _ = Model.objects.get_or_create(
        name="paper", defaults={"digest": "sha256:0", "source": "file:///m"}
    )
    wish = DeploymentWish(
        name=name, model_id=model.pk, replicas=replicas, engine=ENGINE, replica_memory_bytes=GIB
    )
    return create_deployment(wish, actor="user:test", now=clock.now())


def seconds_until(condition: object, what: str, *, seconds: float = 30.0) -> float:
    """Wait for a condition and say how long it took."""
    started = time.monotonic()
    wait_for(condition, what, seconds=seconds)  # type: ignore[arg-type]  # any callable
    return time.monotonic() - started


def tracebacks(log: Path) -> list[str]:
    """Exceptions that a process logged, by their last line."""
    return re.findall(r"^(\w[\w.]*(?:Error|Exception)[^\n]*)$", log.read_text(), re.MULTILINE)
