"""The whole way of an agent onto a machine: a real OpenSSH server, the real agent, real stores."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exaserve_ops.adapters.agent_bundle import build_bundle
from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.domain.installation import STEPS, Credentials
from exaserve_ops.inventory.models import InstallationStep, JoinToken, Node, NodeInstallation, SshHostKey
from exaserve_ops.inventory.services import advance_liveness
from exaserve_ops.inventory.services.installations import (
    InstallationWish,
    ask_installation,
    set_restart_when_dead,
)
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from tests.fakes.sshd import SshServer
from tests.ssh.conftest import CODE, Plant, copy_tree, ssh_agent

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(170)]


def steps_of(row: NodeInstallation) -> dict[str, str]:
    return dict(row.steps.filter(run=row.run).values_list("name", "outcome"))


def events_of(row: NodeInstallation) -> list[str]:
    rows = Event.objects.filter(subject_kind="installation", subject_id=str(row.pk))
    return list(rows.order_by("pk").values_list("event", flat=True))


def ask(
    plant: Plant, row: NodeInstallation, action: str, credentials: Credentials | None
) -> NodeInstallation:
    if credentials is not None:
        plant.vault.keep(str(row.pk), credentials)
    ask_installation(row.pk, action, reason="test", actor="user:olga", now=clock.now())
    return plant.settle(row)


def agent_pid(row: NodeInstallation) -> int:
    return int((Path(row.folder) / "home/run/agent.lock").read_text())


def test_a_node_is_installed_upgraded_restarted_and_removed(  # noqa: PLR0915 - one story, told in order
    make_plant: Callable[..., Plant],
    server: SshServer,
    wish: InstallationWish,
    tmp_path: Path,
) -> None:
    """One agent all the way: starting one takes seconds, so what follows builds on what came before."""
    plant = make_plant()
    credentials = Credentials(private_key=server.private_key)
    row = plant.install(wish, credentials)
    assert row.status == "installed", row.status_reason
    assert set(steps_of(row).values()) <= {"done", "warning"}
    assert tuple(steps_of(row)) == STEPS["install"]
    assert events_of(row) == ["created", "offered", "confirmed", "started", "finished"]
    node = Node.objects.get(name="gpu-1")
    assert (row.node_id, node.liveness, row.facts["service"]) == (node.pk, "alive", "process")
    pin = SshHostKey.objects.get()
    assert (pin.port, pin.fingerprint) == (server.port, server.fingerprint())

    # No secret is anywhere but where it must be.
    secret_lines = [line for line in server.private_key.splitlines() if len(line) > 40]
    kept = str([list(m.objects.values()) for m in (NodeInstallation, InstallationStep, Event, JoinToken)])
    assert not any(line in kept for line in secret_lines)
    assert plant.vault.find(str(row.pk)) is None
    folder = Path(row.folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not (folder / "join-token").exists()
    assert (folder / "home/identity.json").stat().st_mode & 0o777 == 0o600

    # An upgrade puts the new tree beside the old one, and the agent of the old one ends.
    old_version, old_pid = row.facts["running_version"], agent_pid(row)
    tree = copy_tree(tmp_path / "tree")
    newer = make_plant(tree=tree)
    row = ask(newer, row, "upgrade", credentials)
    assert row.status == "installed", row.status_reason
    assert row.facts["previous_version"] == old_version
    assert row.facts["running_version"] == build_bundle(tree).version
    assert (folder / "current").resolve().name == row.facts["running_version"]
    assert (folder / "versions" / old_version).is_dir()
    assert agent_pid(row) != old_pid
    node.refresh_from_db()
    assert node.agent_version == "0.1.1"

    # An agent that stands still is killed and started; without credentials nothing can be done.
    refused = ask(newer, row, "restart_agent", None)
    assert (refused.status, steps_of(refused)) == ("failed", {"connect": "failed"})
    assert "is not kept any more: give it again" in refused.status_reason
    stopped = agent_pid(row)
    os.kill(stopped, signal.SIGSTOP)
    row = ask(newer, row, "restart_agent", credentials)
    assert row.status == "installed", row.status_reason
    assert agent_pid(row) != stopped

    # Removed: drained as far as somebody does so, stopped, deleted, retired, worth nothing.
    advance_liveness(node.pk, "lost", reason="test", actor="test", now=clock.now())
    pid = agent_pid(row)
    row = ask(newer, row, "remove", credentials)
    assert row.status == "removed", row.status_reason
    assert not folder.exists()
    assert not Path(f"/proc/{pid}").exists()
    node.refresh_from_db()
    assert (node.liveness, node.cordoned, node.key_epoch) == ("retired", True, 2)
    assert not Node.objects.filter(name="gpu-1").exists()


def test_an_upgrade_that_does_not_report_goes_back(
    make_plant: Callable[..., Plant],
    server: SshServer,
    wish: InstallationWish,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant, credentials = make_plant(), Credentials(private_key=server.private_key)
    row = plant.install(wish, credentials)
    assert row.status == "installed", row.status_reason
    good = row.facts["running_version"]
    tree = copy_tree(tmp_path / "tree")
    # It can be imported, but dies as soon as it runs.
    (tree / "workers/agent/__main__.py").write_text("raise SystemExit('this version is broken')\n")
    monkeypatch.setattr("exaserve_ops.controllers.installation_run.HELLO_SECONDS", 3.0)
    row = ask(make_plant(tree=tree), row, "upgrade", credentials)
    assert row.status == "failed"
    assert "no report of it arrived" in row.status_reason
    log = row.steps.get(run=row.run, name="hello").log
    assert "this version is broken" in log
    assert f"rolled back to {good}" in log
    assert row.facts["running_version"] == good
    assert (Path(row.folder) / "current").resolve().name == good


def test_a_dead_agent_is_restarted_over_ssh_once_for_each_death(
    make_plant: Callable[..., Plant], server: SshServer, wish: InstallationWish, tmp_path: Path
) -> None:
    plant = make_plant()
    row = plant.install(wish, Credentials(private_key=server.private_key))
    assert row.status == "installed", row.status_reason
    with pytest.raises(ConflictError, match="ssh-agent of the controllers"):
        set_restart_when_dead(row.pk, wanted=True, actor="user:olga", now=clock.now())
    NodeInstallation.objects.filter(pk=row.pk).update(auth="agent")
    set_restart_when_dead(row.pk, wanted=True, actor="user:olga", now=clock.now())
    supervisor = int((Path(row.folder) / "supervisor.pid").read_text())
    for pid in (supervisor, agent_pid(row)):
        os.kill(pid, signal.SIGKILL)
    node = advance_liveness(row.node_id, "lost", reason="three missed", actor="test", now=clock.now())  # type: ignore[arg-type]  # it is installed
    with ssh_agent(tmp_path / "agent.sock", server.user_key):
        plant.step()
        row = plant.settle(row)
    assert row.status == "installed", row.status_reason
    node.refresh_from_db()
    assert node.liveness == "alive"
    told = Event.objects.filter(subject_kind="node", subject_id=str(node.pk)).order_by("pk")
    assert [e for e in told.values_list("event", flat=True) if "restart" in e] == [
        "agent_restart_over_ssh",
        "agent_restarted",
    ]
    # The machine goes away with the next death: tried once, said so, and left to a person.
    server.stop()
    advance_liveness(node.pk, "lost", reason="three missed", actor="test", now=clock.now())
    plant.step()
    row = plant.settle(row)
    assert row.status == "failed"
    assert "refuses connections" in row.status_reason
    runs = row.run
    for _ in range(5):
        plant.step()
    row = plant.settle(row)
    assert row.run == runs
    assert events_of(row).count("asked") == 2


def test_every_file_of_a_node_comes_out_of_this_tree_and_the_same_tree_makes_the_same_bytes(
    tmp_path: Path,
) -> None:
    bundle: Any = build_bundle(CODE)
    assert build_bundle(CODE) == bundle
    tree = copy_tree(tmp_path / "tree")
    assert build_bundle(tree).version != bundle.version
    assert bundle.version.startswith("0.1.0-")
