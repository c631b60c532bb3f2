"""Controllers as processes of their own, on the test's database and store, and a simulated fleet."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
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
from tests.fakes.front_door import FrontDoor, inference_key
from tests.fakes.node import wait_for
from tests.fakes.tap import Tap
from workers.protocol import digests
from workers.simulation.config import SimulationConfig
from workers.simulation.faults import Fault, parse_fault
from workers.simulation.identity import ENGINE, PORTS_PER_SLOT, NodeIdentity
from workers.simulation.process import Simulation

CODE = Path(__file__).resolve().parents[2]
_OF_OUTAGES = (
    *("redis.exceptions.", "psycopg.OperationalError", "psycopg.errors.", "django.db.utils.OperationalError"),
    *("FileNotFoundError", "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError"),
    *("kombu.exceptions.OperationalError", "ConnectionError", "psycopg_pool.", "TimeoutError"),
    *("django.db.utils.InterfaceError", "exaserve_ops.adapters.leadership.FencedError"),
    *("exaserve_ops.adapters.route_table.OvertakenError", "django.db.utils.DatabaseError: consuming"),
    "exaserve_ops.inventory.domain.store_users.StoreAwayError",
)
"""Beginnings of errors that say that a store is away, or that another controller leads."""


SLOTS = 4
"""Replicas of one simulated node."""


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
    store: Path | None = None
    """Socket of the store to use; `None`: that of the test run."""
    controllers: list[Controller] = field(default_factory=list)
    doors: list[FrontDoor] = field(default_factory=list)
    postgres: Tap = field(init=False)
    redis: Tap = field(init=False)

    def __post_init__(self) -> None:
        connection.ensure_connection()
        info = connection.connection.info
        name = f".s.PGSQL.{info.port}"
        self.postgres = Tap(self.sockets / name, Path(info.host) / name)
        store = self.store or Path(urlsplit(os.environ["REDIS_URL"]).path)
        self.redis = Tap(self.sockets / "redis", store)
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

    def open_door(self, model: str) -> FrontDoor:
        """Start a gateway."""
        self.doors.append(FrontDoor(self.folder, self.redis_url, inference_key(), model))
        return self.doors[-1]

    def strange_errors(self) -> list[str]:
        """What the controllers logged with a traceback that no outage explains."""
        found = [line for controller in self.controllers for line in tracebacks(controller.log)]
        return [line for line in found if not line.startswith(_OF_OUTAGES)]

    def end(self) -> None:
        for door in self.doors:
            door.end()
        self.postgres.mend()
        self.redis.mend()
        for controller in self.controllers:
            controller.end()
        self.postgres.close()
        self.redis.close()


def _free_block(count: int) -> int:
    """First of so many ports in a row that nobody listens on, below those that are given out."""
    for first in random.sample(range(20_000, 29_900, count), 50):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


class PaperNodes:
    """Simulated nodes in a thread of the test, which can be silenced and heard again."""

    def __init__(
        self,
        redis_url: str,
        *,
        count: int = 6,
        racks: int = 2,
        faults: Iterable[Fault] = (),
        serve: bool = False,
        seed: int = 7,
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
            redis_url=redis_url,
            seed=seed,
            nodes=tuple(identities),
            slots=SLOTS,
            first_port=_free_block(PORTS_PER_SLOT * SLOTS) if serve else 41_000,
            faults=tuple(faults),
            serve=serve,
        )
        self.simulation = Simulation(config)
        self._thread = threading.Thread(target=self.simulation.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        wait_for(lambda: set(self.liveness().values()) == {"alive"}, "all nodes to be alive", seconds=30)

    def stop(self) -> None:
        self.simulation.stop()
        self._thread.join(10)

    def strike(self, word: str) -> None:
        """Let a fault begin now, said as `simulate --fault` takes it: `node-death@0s:nodes=sim-2`."""
        with self.simulation.lock:
            self.simulation.fleet.add_fault(parse_fault(word), time.monotonic())

    def launches(self) -> dict[str, int]:
        """Attempts so far of every replica that a node knows."""
        with self.simulation.lock:
            return {
                replica_id: replica.attempt
                for node in self.simulation.fleet.nodes
                for replica_id, replica in node.replicas.items()
            }

    def places(self) -> dict[str, list[str]]:
        """By replica, the nodes on which it is now, whatever the record says."""
        found: dict[str, list[str]] = {}
        with self.simulation.lock:
            for node in self.simulation.fleet.nodes:
                for replica_id in node.replicas:
                    found.setdefault(replica_id, []).append(node.identity.name)
        return found

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
        name=name,
        model_id=model.pk,
        replicas=replicas,
        engine=ENGINE,
        replica_memory_bytes=GIB,
        drain_seconds=5,
    )
    return create_deployment(wish, actor="user:test", now=clock.now())


def seconds_until(condition: object, what: str, *, seconds: float = 30.0) -> float:
    """Wait for a condition and say how long it took."""
    started = time.monotonic()
    wait_for(condition, what, seconds=seconds)  # type: ignore[arg-type]  # any callable
    return time.monotonic() - started


def tracebacks(log: Path) -> list[str]:
    """Exceptions that a process logged, by their last line; of a chain, the one that came out."""
    pattern = r"^(\w[\w.]*(?:Error|Exception)[^\n]*)$(?!\n\n(?:During handling|The above exception))"
    return re.findall(pattern, log.read_text(), re.MULTILINE)
