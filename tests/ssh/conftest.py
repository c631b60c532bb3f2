"""What tests of SSH share: a real server, the real agent, and a control plane to join."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import redis
from django.conf import settings
from pytest_django.live_server_helper import LiveServer

from exaserve_ops.adapters.reports import RedisReportSource
from exaserve_ops.adapters.ssh_credentials import CredentialVault
from exaserve_ops.adapters.ssh_scripts import UNINSTALL
from exaserve_ops.adapters.ssh_site import SiteSettings, SshSites
from exaserve_ops.adapters.store_users import RedisStoreUsers
from exaserve_ops.api.ports import store_users
from exaserve_ops.controllers.installations import InstallationPorts, Installations
from exaserve_ops.inventory.domain.installation import Credentials
from exaserve_ops.inventory.models import NodeInstallation
from exaserve_ops.inventory.services import advance_liveness, record_hello
from exaserve_ops.inventory.services.installations import (
    InstallationWish,
    confirm_host_key,
    create_installation,
)
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.reports import HelloReport
from exaserve_ops.wiring import NodeKeys
from tests.fakes.sshd import SSHD, USER, SshServer, needs_sshd

CODE = Path(__file__).resolve().parents[2]
TREE_PYTHON = sys.executable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SSHD is None and "/tests/ssh/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason=needs_sshd))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    server = SshServer(tmp_path / "sshd")
    server.start()
    yield server
    server.stop()


class Ears:
    """Takes the reports of agents in: who said hello is recorded, and is alive."""

    def __init__(self, source: RedisReportSource) -> None:
        self._source = source

    def listen(self) -> None:
        for received in self._source.read(limit=100, block_seconds=0.001):
            self._source.acknowledge([received.position])
            if isinstance(received.report, HelloReport):
                node = record_hello(UUID(received.report.node_id), received.report.facts, now=clock.now())
                event = {"joining": "reported", "dead": "recovered"}.get(node.liveness)
                if event:
                    advance_liveness(node.pk, event, reason="hello", actor="test", now=clock.now())


@dataclass
class Plant:
    """A leading controller's part that installs, and the part that hears agents; stepped by the test."""

    installations: Installations
    vault: CredentialVault
    stop: threading.Event
    ears: Ears
    ports: InstallationPorts

    def step(self) -> None:
        self.installations.step()
        self.ears.listen()

    def until(self, condition: Callable[[], Any], what: str, *, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds:g} s: {what}")
            self.step()
            time.sleep(0.05)

    def settle(self, row: NodeInstallation, *, seconds: float = 60.0) -> NodeInstallation:
        """Step until nothing is under way any more."""

        def is_settled() -> bool:
            row.refresh_from_db()
            return row.status not in {"new", "queued", "working"} and self.installations.is_idle()

        self.until(is_settled, f"{row} settles; it is {row.status}", seconds=seconds)
        return row

    def ask(self, wish: InstallationWish, credentials: Credentials | None) -> NodeInstallation:
        row = create_installation(wish, actor="user:olga", now=clock.now())
        if credentials is not None:
            self.vault.keep(str(row.pk), credentials)
        return row

    def install(self, wish: InstallationWish, credentials: Credentials | None) -> NodeInstallation:
        """Ask, and confirm the host key that is shown."""
        row = self.settle(self.ask(wish, credentials))
        assert row.status == "confirming", row.status_reason
        confirm_host_key(row.pk, row.offered_fingerprint, actor="user:olga", now=clock.now())
        return self.settle(row)


@pytest.fixture(autouse=True)
def _store_users(redis_client: redis.Redis) -> None:
    """Agents that are installed join, and get users of their own."""
    store_users.use(RedisStoreUsers(redis_client))


@pytest.fixture
def site_settings(live_server: LiveServer) -> SiteSettings:
    return SiteSettings(
        control_url=live_server.url, redis_url=os.environ["REDIS_URL"], tree=CODE, free_disk_bytes=1
    )


@pytest.fixture
def make_plant(site_settings: SiteSettings, redis_client: redis.Redis) -> Iterator[Callable[..., Plant]]:
    made: list[Plant] = []

    def make(*, max_connections: int = 4, **changes: Any) -> Plant:
        vault = CredentialVault(redis_client, settings.ENV.fleet_secret)
        sites = SshSites(replace(site_settings, **changes), clock.now)
        ports = InstallationPorts(sites, vault, max_connections)
        source = RedisReportSource(redis_client, f"test-{len(made)}", NodeKeys(settings.ENV.fleet_secret))
        source.read(limit=1, block_seconds=0.001)  # the group begins here
        stop = threading.Event()
        plant = Plant(Installations(ports, stop), vault, stop, Ears(source), ports)
        made.append(plant)
        return plant

    yield make
    for plant in made:
        plant.stop.set()
        deadline = time.monotonic() + 30
        while not plant.installations.is_idle() and time.monotonic() < deadline:
            time.sleep(0.05)


@pytest.fixture
def plant(make_plant: Callable[..., Plant]) -> Plant:
    return make_plant()


def copy_tree(folder: Path) -> Path:
    """The agent's tree, one version on."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(CODE / "workers", folder / "workers", ignore=ignored)
    shutil.copy(CODE / "requirements-agent.txt", folder)
    marker = folder / "workers/agent/__init__.py"
    marker.write_text(marker.read_text().replace('"0.1.0"', '"0.1.1"'))
    return folder


@contextmanager
def ssh_agent(socket: Path, key: Path) -> Iterator[None]:
    """An ssh-agent that holds a key, where this process looks for it."""
    program = shutil.which("ssh-agent")
    assert program is not None
    process = subprocess.Popen([program, "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    before = os.environ.get("SSH_AUTH_SOCK")
    os.environ["SSH_AUTH_SOCK"] = str(socket)
    try:
        deadline = time.monotonic() + 10
        while not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        subprocess.run([shutil.which("ssh-add") or "ssh-add", "-q", str(key)], check=True)
        yield
    finally:
        del os.environ["SSH_AUTH_SOCK"]
        if before is not None:
            os.environ["SSH_AUTH_SOCK"] = before
        process.terminate()
        process.wait(10)


@pytest.fixture
def wish(server: SshServer, tmp_path: Path) -> Iterator[InstallationWish]:
    yield InstallationWish(
        host=server.host,
        port=server.port,
        user=USER,
        auth="key",
        node_name="gpu-1",
        folder=str(tmp_path / "node"),
        python=TREE_PYTHON,
    )
    for marker in list(tmp_path.glob("**/.exaserve-agent")):  # what a failed test left behind ends with it
        command = ["/bin/sh", "-s", "--", str(marker.parent), "process", "none.service"]
        subprocess.run(command, input=UNINSTALL.encode(), check=False, timeout=60, stdout=subprocess.DEVNULL)
