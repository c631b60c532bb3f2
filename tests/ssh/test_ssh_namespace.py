"""A machine of its own as far as the network goes: a namespace, reached over a pair of virtual cables."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from exaserve_ops.inventory.domain.installation import Credentials
from exaserve_ops.inventory.models import SshHostKey
from exaserve_ops.inventory.services.installations import InstallationWish, ask_installation
from exaserve_ops.lib import clock
from tests.fakes.sshd import IS_ROOT, SshServer
from tests.ssh.conftest import Plant

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]

IP = shutil.which("ip") or "/sbin/ip"
NAME = f"exaops-{os.getpid() % 100_000}"
HERE, THERE = f"v{os.getpid() % 100_000}a", f"v{os.getpid() % 100_000}b"
CONTROL, NODE = f"198.18.{os.getpid() % 250}.1", f"198.18.{os.getpid() % 250}.2"
"""Of the range that is set aside for tests of networks: no real machine is there."""


def ip(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True, capture_output=True)


@pytest.fixture
def namespace() -> Iterator[str]:
    if not IS_ROOT or not Path(IP).exists():
        pytest.skip("network namespaces need root and iproute2")
    try:
        ip("netns", "add", NAME)
        ip("link", "add", HERE, "type", "veth", "peer", "name", THERE)
        ip("link", "set", THERE, "netns", NAME)
        ip("address", "add", f"{CONTROL}/30", "dev", HERE)
        ip("link", "set", HERE, "up")
        ip("-n", NAME, "address", "add", f"{NODE}/30", "dev", THERE)
        ip("-n", NAME, "link", "set", THERE, "up")
        ip("-n", NAME, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        for leftover in (["link", "delete", HERE], ["netns", "delete", NAME]):
            subprocess.run([IP, *leftover], check=False, capture_output=True)
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
    yield NAME
    ip("link", "delete", HERE)  # its other end goes with it, whoever still holds the namespace
    ip("netns", "delete", NAME)


@pytest.fixture
def far_server(namespace: str, tmp_path: Path) -> Iterator[SshServer]:
    server = SshServer(tmp_path / "far")
    server.host, server.prefix = NODE, (IP, "netns", "exec", namespace)
    server.start()
    yield server
    server.stop()


def test_a_machine_behind_a_cable_is_examined_over_it_and_is_gone_with_it(
    make_plant: Callable[..., Plant], far_server: SshServer, wish: InstallationWish
) -> None:
    """Redis and the control plane listen on loopback here: from there, they cannot be reached."""
    plant = make_plant(control_url=f"http://{CONTROL}:9", redis_url=f"redis://{CONTROL}:9/0")
    there = replace(wish, host=far_server.host, port=far_server.port)
    row = plant.install(there, Credentials(private_key=far_server.private_key))
    assert SshHostKey.objects.get().host == NODE
    steps = dict(row.steps.values_list("name", "outcome"))
    assert steps["ports"] == "done"
    assert (row.status, steps["network"]) == ("failed", "failed")
    assert f"Redis at {CONTROL}:9 cannot be reached from there" in row.status_reason
    ip("-n", NAME, "link", "set", THERE, "down")
    ask_installation(row.pk, "install", reason="", actor="user:olga", now=clock.now())
    row = plant.settle(row)
    assert row.status == "failed"
    assert f"{NODE} port {far_server.port} cannot be reached" in row.status_reason
