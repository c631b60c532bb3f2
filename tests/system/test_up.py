"""`manage.py up` as a person meets it: it starts, answers, survives what we kill, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from bench.chat_client import ChatError
from bench.fleet_run import FleetRun, leftovers, start_fleet, wait_until_up
from exaserve_ops.adapters.processes import identify

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

CODE = Path(__file__).resolve().parents[2]
NODES = 2
REPLICAS = 2


class Place:
    """A folder for one fleet, which is started when a test needs it and it does not run."""

    def __init__(self, var: Path) -> None:
        self.var = var
        self.run: FleetRun | None = None

    def up(self) -> FleetRun:
        if self.run is None or self.run.process.poll() is not None:
            self.run = start_fleet(CODE, self.var, "--nodes", str(NODES))
            wait_until_up(self.run)
        return self.run

    def end(self) -> None:
        if self.run is not None and self.run.process.poll() is None:
            self.run.stop()
        for process in leftovers(self.var):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.identity.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    # Deeper than a Unix socket's path may be long, with a blank, and closed to other users.
    closed = tmp_path_factory.mktemp("fleet")
    closed.chmod(0o700)
    place = Place(closed / ("a deep folder " + "x" * 100) / "var")
    place.var.parent.mkdir()
    try:
        yield place
    finally:
        place.end()


@pytest.fixture
def fleet(place: Place) -> FleetRun:
    return place.up()


def ready_pids(run: FleetRun) -> dict[str, int]:
    return {one["name"]: one["pid"] for one in run.replicas() if one["status"] == "ready"}


def all_ready(run: FleetRun) -> bool:
    return len(ready_pids(run)) == NODES * REPLICAS


def answers(run: FleetRun) -> bool:
    try:
        return run.chat().ask([{"role": "user", "content": "Hello"}], max_tokens=4).completion_tokens > 0
    except ChatError:
        return False


def kill_program(run: FleetRun, name: str) -> None:
    """Kill a program the hard way and wait until `up` has seen its successor."""
    before = run.summary()["pids"][name]
    os.kill(before, signal.SIGKILL)
    run.wait_until(lambda: run.summary()["pids"][name] not in {0, before}, f"another {name}")


def test_printed_command_streams_an_answer(fleet: FleetRun) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    printed = re.search(r"(curl -N .*?)\n\n", fleet.text(), re.DOTALL)
    assert printed, fleet.text()
    done = subprocess.run(
        ["/bin/sh", "-c", printed[1]], capture_output=True, text=True, timeout=60, check=True
    )
    events = [line for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 10


def test_replicas_are_spread_over_the_nodes(fleet: FleetRun) -> None:
    nodes = [one["node"] for one in fleet.replicas() if one["status"] == "ready"]
    assert sorted(nodes.count(node) for node in set(nodes)) == [REPLICAS] * NODES


def test_summary_is_private_and_names_living_processes(fleet: FleetRun) -> None:
    assert stat.S_IMODE((fleet.var / "up.json").stat().st_mode) == 0o600
    pids = fleet.summary()["pids"]
    assert set(pids) >= {
        "up",
        "supervisord",
        "postgres",
        "valkey",
        "web",
        "controllers",
        "gateway",
        "agent-2",
    }
    assert all(identify(pid) is not None for pid in pids.values())
    password = fleet.summary()["admin_password"]
    assert (fleet.var / "secrets" / "admin_password").read_text() == password
    assert f"admin  {password}" in fleet.text()


def test_no_process_shows_a_secret_on_its_command_line(fleet: FleetRun) -> None:
    secrets = [path.read_text().strip() for path in (fleet.var / "secrets").iterdir()]
    secrets = [secret for secret in secrets if secret]
    assert len(secrets) >= 7
    for process in leftovers(fleet.var):
        with contextlib.suppress(FileNotFoundError):
            line = Path(f"/proc/{process.identity.pid}/cmdline").read_text(errors="replace")
            assert not [secret for secret in secrets if secret in line], process


def test_second_up_in_the_same_folder_is_refused(fleet: FleetRun) -> None:
    environment = {**os.environ, "EXAOPS_VAR_DIR": str(fleet.var)}
    second = subprocess.run(
        [sys.executable, "manage.py", "up"],
        cwd=CODE, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert second.returncode == 1
    assert f"already up, run by process {fleet.process.pid}" in second.stderr
    assert answers(fleet)


@pytest.mark.parametrize("name", ["gateway", "web", "controllers", "chores", "beat", "valkey", "postgres"])
def test_killed_program_comes_back_and_no_replica_notices(fleet: FleetRun, name: str) -> None:
    fleet.wait_until(lambda: all_ready(fleet), "all replicas")
    before = ready_pids(fleet)

    kill_program(fleet, name)

    fleet.wait_until(lambda: answers(fleet), "an answer")
    fleet.wait_until(lambda: ready_pids(fleet) == before, "the same replicas")
    assert f"{name} ended and runs again" in fleet.text()


def test_killed_agent_comes_back_and_adopts_its_replicas(fleet: FleetRun) -> None:
    fleet.wait_until(lambda: all_ready(fleet), "all replicas")
    before = ready_pids(fleet)
    boots = {node["name"]: node["boot_id"] for node in fleet.get("/api/v1/nodes")["results"]}

    kill_program(fleet, "agent-1")

    def is_heard_again() -> bool:
        node = next(one for one in fleet.get("/api/v1/nodes")["results"] if one["name"] == "node-1")
        return bool(node["boot_id"] != boots["node-1"] and node["liveness"] == "alive")

    fleet.wait_until(is_heard_again, "the new agent")
    fleet.wait_until(lambda: ready_pids(fleet) == before, "the same replicas")


def test_session_stays_with_its_replica_over_the_death_of_valkey(fleet: FleetRun) -> None:
    client, session_id = fleet.chat(), str(uuid.uuid4())
    messages = [{"role": "user", "content": f"{session_id}: remember this, and tell me of the sea."}]
    first = client.ask(messages, session_id=session_id)
    identity = json.loads((fleet.var / "nodes" / "node-1" / "identity.json").read_text())
    password = (fleet.var / "secrets" / "valkey_password").read_text().strip()
    own = urlsplit(identity["redis_url"])
    assert own.username == f"exaops-node-{identity['node_id']}"
    with redis.Redis(unix_socket_path=own.path, password=password) as store:
        assert store.execute_command("WAITAOF", 1, 0, 5000)[0] == 1  # a second's loss is allowed; wait it out

    kill_program(fleet, "valkey")
    fleet.wait_until(lambda: answers(fleet), "an answer")

    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And the hills?"}]
    assert client.ask(messages, session_id=session_id).cached_tokens > 0


def test_fleet_whose_up_was_killed_is_taken_over_with_its_replicas(place: Place) -> None:
    old = place.up()
    old.wait_until(lambda: all_ready(old), "all replicas")
    before, password = ready_pids(old), old.summary()["admin_password"]
    old.process.kill()
    old.process.wait()

    new = place.up()

    assert "An earlier run of this fleet was killed" in new.text()
    assert new.summary()["admin_password"] == password
    assert f"admin  {password}" not in new.text()  # shown once, at the first start
    new.wait_until(lambda: ready_pids(new) == before, "the same replicas")
    assert answers(new)


def test_ctrl_c_leaves_no_process_and_the_next_start_goes_on(place: Place) -> None:
    run = place.up()
    summary, deployments = run.summary(), deployment_facts(run)
    nodes = sorted(node["id"] for node in run.get("/api/v1/nodes")["results"])

    assert run.stop(signal.SIGINT) == 0

    assert leftovers(place.var) == ()
    assert not [pid for pid in summary["pids"].values() if identify(pid) is not None]
    assert not (place.var / "up.json").exists()

    again = place.up()
    assert again.summary()["web_url"] == summary["web_url"]
    assert again.summary()["api_token"] == summary["api_token"]
    assert deployment_facts(again) == deployments
    assert sorted(node["id"] for node in again.get("/api/v1/nodes")["results"]) == nodes
    assert answers(again)


def test_second_signal_speeds_up_and_still_leaves_nothing(place: Place) -> None:
    run = place.up()
    pids = run.summary()["pids"]
    run.process.send_signal(signal.SIGTERM)
    run.wait_until(lambda: "Stopping" in run.text(), "the stop to begin")
    assert run.stop(signal.SIGINT) == 0
    assert leftovers(place.var) == ()
    assert not [pid for pid in pids.values() if identify(pid) is not None]


def test_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    var = tmp_path / "var"
    run = start_fleet(
        CODE, var, environment={"REDIS_URL": "redis://127.0.0.1:1/0", "EXAOPS_WEB_PORT": "70000"}
    )
    assert run.process.wait(60) == 1
    assert "give a number from 1 to 65535" in run.text()
    assert leftovers(var) == ()


def test_interrupted_start_stops_what_had_started(tmp_path: Path) -> None:
    var = tmp_path / "var"
    run = start_fleet(CODE, var)
    run.wait_until(lambda: "+ Valkey" in run.text(), "the stores")
    assert run.stop(signal.SIGINT) == 0
    assert "nothing is left running" in run.text()
    assert leftovers(var) == ()


def deployment_facts(run: FleetRun) -> list[tuple[Any, ...]]:
    found = run.get("/api/v1/deployments")["results"]
    return [(one["id"], one["generation"], one["replicas"]) for one in found]
