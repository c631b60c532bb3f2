"""What goes wrong on machines: each a clear message, and the next try goes on from what is done."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from exaserve_ops.controllers.installation_run import Site, Sites
from exaserve_ops.controllers.installations import Installations
from exaserve_ops.inventory.domain.installation import Credentials, HostKey, Target
from exaserve_ops.inventory.models import InstallationStep, Node, NodeInstallation, SshHostKey
from exaserve_ops.inventory.services.installations import (
    InstallationWish,
    ask_installation,
    begin_run,
    begin_step,
    confirm_host_key,
    create_installation,
    forget_host_key,
)
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError, InvalidInputError, StaleError
from tests.fakes.sshd import IS_ROOT, SshServer
from tests.fakes.world import make_node
from tests.ssh.conftest import Plant

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]


def failed_step(row: NodeInstallation) -> str:
    return str(row.steps.get(run=row.run, outcome="failed").name)


@pytest.fixture
def credentials(server: SshServer) -> Credentials:
    return Credentials(private_key=server.private_key)


def test_a_person_confirms_the_fingerprint_that_is_shown_and_no_other(
    plant: Plant, wish: InstallationWish, credentials: Credentials
) -> None:
    row = plant.settle(plant.ask(wish, credentials))
    assert row.status == "confirming"
    assert row.run == 0
    with pytest.raises(StaleError):
        confirm_host_key(row.pk, "SHA256:another", actor="user:olga", now=clock.now())
    assert not SshHostKey.objects.exists()


def test_changed_host_key_stops_everything_until_a_person_forgets_the_old_one(
    plant: Plant, server: SshServer, wish: InstallationWish, credentials: Credentials
) -> None:
    wrong_python = replace(wish, python="/nowhere/python")
    row = plant.install(wrong_python, credentials)
    before = server.fingerprint()
    server.stop()
    server.make_host_key("ed25519")
    server.start()
    ask_installation(row.pk, "install", reason="", actor="user:olga", now=clock.now())
    row = plant.settle(row)
    assert row.status == "failed"
    for word in (before, server.fingerprint(), "changed", str(server.port)):
        assert word in row.status_reason
    assert row.run == 1, "nothing was begun on a machine that may be another one"
    forget_host_key(SshHostKey.objects.get().pk, actor="user:ada", now=clock.now())
    ask_installation(row.pk, "install", reason="", actor="user:olga", now=clock.now())
    row = plant.settle(row)
    assert (row.status, row.offered_fingerprint) == ("confirming", server.fingerprint())


def test_wrong_password_is_a_clear_message(plant: Plant, wish: InstallationWish) -> None:
    row = plant.install(replace(wish, auth="password"), Credentials(password="wrong words"))
    assert (row.status, failed_step(row)) == ("failed", "connect")
    assert "wrong password or user name" in row.status_reason
    assert "wrong words" not in str(NodeInstallation.objects.values().get())


def test_machine_without_a_python_that_will_do(
    plant: Plant, wish: InstallationWish, credentials: Credentials, tmp_path: Path
) -> None:
    row = plant.install(replace(wish, python="/nowhere/python"), credentials)
    assert (row.status, failed_step(row)) == ("failed", "python")
    assert "/nowhere/python was named, but is no Python 3.11 to 3.13" in row.status_reason
    assert "no interpreter answers there" in row.status_reason
    old = tmp_path / "python3.8"
    old.write_text("#!/bin/sh\necho 3.8.10\n")
    old.chmod(0o755)
    row = plant.settle(plant.ask(replace(wish, python=str(old), folder=f"{wish.folder}-2"), credentials))
    assert f"{old} (3.8) is there" in row.status_reason


def test_too_little_room_is_said_before_anything_is_sent(
    make_plant: Callable[..., Plant], wish: InstallationWish, credentials: Credentials
) -> None:
    row = make_plant(free_disk_bytes=1 << 60).install(wish, credentials)
    assert (row.status, failed_step(row)) == ("failed", "disk")
    assert "is too full" in row.status_reason
    assert "needed" in row.status_reason


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if not IS_ROOT:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)],
        check=False,
        capture_output=True,
    )
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["/bin/umount", "-l", str(folder)], check=True)


def test_disk_that_fills_up_says_so_and_the_next_try_goes_on(
    small_disk: Path,  # first: the server sees what is mounted when it starts
    plant: Plant,
    wish: InstallationWish,
    credentials: Credentials,
) -> None:
    row = plant.install(replace(wish, folder=str(small_disk / "node")), credentials)
    assert (row.status, failed_step(row)) == ("failed", "bundle")
    assert "disk is full" in row.status_reason
    subprocess.run(["/bin/mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    ask_installation(row.pk, "install", reason="", actor="user:olga", now=clock.now())
    sent = row.steps.filter(run=2, name="bundle", outcome="done")
    plant.until(sent.exists, "the archive is there now")


def test_folder_of_somebody_else_is_left_alone(
    plant: Plant, wish: InstallationWish, credentials: Credentials
) -> None:
    folder = Path(wish.folder + "-theirs")
    folder.mkdir()
    (folder / "thesis.tex").write_text("all of it")
    row = plant.install(replace(wish, folder=str(folder)), credentials)
    assert (row.status, failed_step(row)) == ("failed", "disk")
    assert "files that are not ours" in row.status_reason
    plant.vault.keep(str(row.pk), credentials)
    ask_installation(row.pk, "remove", reason="", actor="user:olga", now=clock.now())
    row = plant.settle(row)
    assert row.status == "removed", row.status_reason
    assert (folder / "thesis.tex").read_text() == "all of it"


def test_name_of_another_node_is_said_early(
    plant: Plant, wish: InstallationWish, credentials: Credentials
) -> None:
    make_node("gpu-1")
    row = plant.install(wish, credentials)
    assert (row.status, failed_step(row)) == ("failed", "existing")
    assert "the name gpu-1 is taken" in row.status_reason


def test_redis_that_cannot_be_reached_from_there(
    make_plant: Callable[..., Plant], wish: InstallationWish, credentials: Credentials
) -> None:
    row = make_plant(redis_url="redis://:secret@127.0.0.1:1/0").install(wish, credentials)
    assert (row.status, failed_step(row)) == ("failed", "network")
    assert "Redis at 127.0.0.1:1 cannot be reached from there" in row.status_reason
    assert "secret" not in str(list(InstallationStep.objects.values()))


def test_connection_lost_in_the_middle_is_resumed(
    plant: Plant, server: SshServer, wish: InstallationWish, credentials: Credentials
) -> None:
    row = plant.settle(plant.ask(wish, credentials))
    confirm_host_key(row.pk, row.offered_fingerprint, actor="user:olga", now=clock.now())
    running = InstallationStep.objects.filter(installation=row, name="environment", outcome="running")
    plant.until(running.exists, "the environment is being looked at")
    server.stop()
    row = plant.settle(row)
    assert (row.status, failed_step(row)) == ("failed", "environment")
    assert "connection" in row.status_reason
    server.start()
    ask_installation(row.pk, "install", reason="", actor="user:olga", now=clock.now())
    row = plant.settle(row)
    assert row.status == "installed", row.status_reason
    assert row.steps.get(run=row.run, name="bundle").summary.endswith("is there already")
    assert Node.objects.get().liveness == "alive"


def test_what_a_controller_left_in_the_middle_is_begun_again_by_the_next(
    make_plant: Callable[..., Plant], wish: InstallationWish, credentials: Credentials
) -> None:
    dead = make_plant()
    row = dead.settle(dead.ask(replace(wish, python="/nowhere/python"), credentials))
    confirm_host_key(row.pk, row.offered_fingerprint, actor="user:olga", now=clock.now())
    # As it stands in the record of a controller that was killed at that moment.
    begin_run(row.pk, actor="controller:installations", now=clock.now())
    left = begin_step(row.pk, 1, "connect", now=clock.now())
    row = make_plant().settle(row)
    left.refresh_from_db()
    assert left.outcome == "interrupted"
    assert (row.run, row.status) == (2, "failed")
    assert failed_step(row) == "python"


def test_run_of_a_controller_that_lost_the_lead_stops_at_its_next_step(
    make_plant: Callable[..., Plant], wish: InstallationWish, credentials: Credentials
) -> None:
    old = make_plant()
    row = old.settle(old.ask(wish, credentials))
    confirm_host_key(row.pk, row.offered_fingerprint, actor="user:olga", now=clock.now())
    running = InstallationStep.objects.filter(installation=row, outcome="running", name="connect")
    old.until(running.exists, "the old one works")
    begin_again = NodeInstallation.objects.filter(pk=row.pk)
    begin_again.update(run=7)  # as the next leader's `begin_run` does
    old.until(old.installations.is_idle, "the old one lets go")
    assert set(row.steps.values_list("name", flat=True)) == {"connect"}
    row.refresh_from_db()
    assert row.status == "working", "it is for the new leader to say what becomes of it"


class CountingSites:
    """The way to machines, with a count of who is on it; each waits a little for company."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._lock = threading.Lock()
        self._company = threading.Barrier(2)
        self.ports: list[int] = []
        self.most = 0

    def fetch_host_key(self, target: Target) -> HostKey:
        with self._lock:
            assert target.port not in self.ports, "two connections to one server at once"
            self.ports.append(target.port)
            self.most = max(self.most, len(self.ports))
        with contextlib.suppress(threading.BrokenBarrierError):
            self._company.wait(2.0)
        try:
            return self._sites.fetch_host_key(target)
        finally:
            with self._lock:
                self.ports.remove(target.port)

    def open(
        self, target: Target, credentials: Credentials, log: Callable[[str], None]
    ) -> AbstractContextManager[Site]:
        return self._sites.open(target, credentials, log)


def test_no_more_connections_than_allowed_and_one_for_each_server(
    make_plant: Callable[..., Plant], server: SshServer, wish: InstallationWish, tmp_path: Path
) -> None:
    others = [SshServer(tmp_path / f"d{n}") for n in range(3)]
    for other in others:
        other.start()
    plant = make_plant()
    sites = CountingSites(plant.ports.sites)
    plant.installations = Installations(replace(plant.ports, sites=sites, max_connections=2), plant.stop)
    try:
        rows = [
            plant.ask(replace(wish, port=place.port, folder=f"/x/{n}"), None)
            for place in (server, *others)
            for n in range(2)
        ]
        for row in rows:
            assert plant.settle(row).status == "confirming"
    finally:
        for other in others:
            other.stop()
    assert sites.most == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"host": "a b"}, "host"),
        ({"host": "-oProxyCommand=x"}, "host"),
        ({"user": "root;reboot"}, "user"),
        ({"folder": "/opt/$(reboot)"}, "folder"),
        ({"folder": "../../etc"}, "folder"),
        ({"folder": "/"}, "folder"),
        ({"python": "python3 -c x"}, "python"),
        ({"port": 0}, "port"),
        ({"restart_when_dead": True}, "restart_when_dead"),
    ],
)
def test_wish_that_makes_no_sense_is_refused_with_its_field(
    wish: InstallationWish, change: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        create_installation(replace(wish, **change), actor="user:olga", now=clock.now())  # type: ignore[arg-type]  # any field
    assert refusal.value.field == field


def test_one_place_has_one_installation(wish: InstallationWish) -> None:
    create_installation(wish, actor="user:olga", now=clock.now())
    with pytest.raises(ConflictError, match="exists already"):
        create_installation(wish, actor="user:olga", now=clock.now())
