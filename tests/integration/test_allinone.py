"""The all-in-one fleet's decisions: who is started with what, stopped when, and told of how."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exaserve_ops.adapters.fleet_files import open_fleet_files, remove_runtime
from exaserve_ops.adapters.processes import find_labelled, identify, is_alive
from exaserve_ops.adapters.supervision import Program, ProgramState, ProgramStatus
from exaserve_ops.management.allinone import programs
from exaserve_ops.management.allinone.console import (
    Console,
    InterruptedStartError,
    Interrupts,
    StartError,
    Terminal,
)
from exaserve_ops.management.allinone.errands import plain_environment, run_errand
from exaserve_ops.management.allinone.watch import LONGEST_WAIT_SECONDS, take_look

ADDRESSES = programs.FleetAddresses(
    database_url="postgresql:///x?password=db-secret",
    redis_url="unix://:redis-secret@/run/valkey.sock",
    web_port=20_001,
    gateway_port=20_002,
    public_url="http://127.0.0.1:20001",
)
SECRETS = programs.FleetSecrets("django-secret", "fleet-secret")
SECRET_TEXTS = ("db-secret", "redis-secret", "django-secret", "fleet-secret")


def site(tmp_path: Path, nodes: int = 2, **tuning: str) -> programs.FleetSite:
    homes = {f"node-{number}": tmp_path / "nodes" / f"node-{number}" for number in range(1, nodes + 1)}
    return programs.FleetSite("fleet", tmp_path, tmp_path / "var", homes, tmp_path / "key", tuning)


def shape(nodes: int = 2, replicas: int = 2) -> programs.FleetShape:
    return programs.FleetShape(nodes, replicas, with_demo=True, with_load=True, cpu_count=8, memory_bytes=100)


def all_programs(tmp_path: Path) -> list[Program]:
    here = site(tmp_path)
    environment = programs.control_environment(here, ADDRESSES, SECRETS)
    return [
        *programs.store_programs(here, ("postgres",), ("valkey",)),
        *programs.control_programs(here, environment),
        programs.gateway_program(here, environment),
        *programs.agent_programs(here, shape()),
        programs.load_program(here, ADDRESSES),
    ]


def test_no_secret_is_on_a_command_line(tmp_path: Path) -> None:
    lines = [" ".join(program.command) for program in all_programs(tmp_path)]
    assert not [line for line in lines if any(secret in line for secret in SECRET_TEXTS)]


def test_agents_and_stores_see_no_secret_and_the_gateway_no_database(tmp_path: Path) -> None:
    for program in all_programs(tmp_path):
        values = " ".join(program.environment.values())
        if program.name in {"web", "controllers", "chores", "beat"}:
            continue
        if program.name == programs.GATEWAY:
            assert "db-secret" not in values
            assert "django-secret" not in values
        else:
            assert not [secret for secret in SECRET_TEXTS if secret in values], program.name


def test_every_program_is_labelled(tmp_path: Path) -> None:
    for program in all_programs(tmp_path):
        assert program.environment["EXAOPS_FLEET"] == "fleet"
        assert program.environment["EXAOPS_PROGRAM"] == program.name


def test_whoever_brings_work_stops_first_and_whoever_keeps_it_last(tmp_path: Path) -> None:
    names = [program.name for program in all_programs(tmp_path)]
    assert programs.stop_stages(names) == (
        ("load",), ("gateway",), ("agent-1", "agent-2"), ("beat", "chores", "controllers"),
        ("web",), ("valkey",), ("postgres",),
    )  # fmt: skip
    assert programs.stop_stages(["postgres", "web"]) == (("web",), ("postgres",))


@pytest.mark.parametrize("nodes", [1, 2, 7, 64])
def test_nodes_of_one_machine_share_neither_ports_nor_memory(tmp_path: Path, nodes: int) -> None:
    agents = programs.agent_programs(site(tmp_path, nodes), shape(nodes))
    taken: set[int] = set()
    for agent in agents:
        first, _, last = agent.environment["EXAOPS_AGENT_PORTS"].partition("-")
        ports = set(range(int(first), int(last) + 1))
        assert len(ports) >= 20
        assert not ports & taken
        assert ports <= set(programs.AGENT_PORTS)
        taken |= ports
    assert sum(int(agent.environment["EXAOPS_AGENT_MEMORY_BYTES"]) for agent in agents) <= 80


def test_what_a_person_sets_for_agents_and_gateway_wins(tmp_path: Path) -> None:
    here = site(tmp_path, EXAOPS_AGENT_PORTS="5000-5009", EXAOPS_GATEWAY_ATTEMPTS="1", OTHER="x")
    assert programs.agent_programs(here, shape())[0].environment["EXAOPS_AGENT_PORTS"] == "5000-5009"
    gateway = programs.gateway_program(here, programs.control_environment(here, ADDRESSES, SECRETS))
    assert gateway.environment["EXAOPS_GATEWAY_ATTEMPTS"] == "1"
    assert gateway.environment["EXAOPS_GATEWAY_PORT"] == "20002"
    assert "OTHER" not in gateway.environment


def status(name: str, state: ProgramState, pid: int = 0) -> dict[str, ProgramStatus]:
    return {name: ProgramStatus(name, state, pid, "Exited too quickly")}


def test_return_of_a_killed_program_is_told_once() -> None:
    running, starting = ProgramState.RUNNING, ProgramState.STARTING
    look, news = take_look(None, status("web", running, 10), now_seconds=0)
    assert news.lines == ()
    look, news = take_look(look, status("web", ProgramState.EXITED), now_seconds=1)
    assert news.lines == ()
    look, news = take_look(look, status("web", starting, 11), now_seconds=2)
    assert news.lines == ("web ended and runs again as process 11",)
    look, news = take_look(look, status("web", running, 11), now_seconds=3)
    assert news.lines == ()
    assert look.pids == {"web": 11}


def test_program_that_does_not_come_up_is_told_once_and_tried_at_least_each_half_minute() -> None:
    backoff = status("web", ProgramState.BACKOFF)
    look, news = take_look(None, backoff, now_seconds=0)
    assert news.lines == ("web does not come up: Exited too quickly",)
    look, news = take_look(look, backoff, now_seconds=LONGEST_WAIT_SECONDS - 1)
    assert (news.lines, news.overdue) == ((), ())
    look, news = take_look(look, backoff, now_seconds=LONGEST_WAIT_SECONDS)
    assert news.overdue == ("web",)
    _, news = take_look(look, backoff, now_seconds=LONGEST_WAIT_SECONDS + 1)
    assert news.overdue == ()


def test_stage_says_what_it_waits_for_when_it_gives_up() -> None:
    stream = io.StringIO()
    console = Console(Terminal(stream), Interrupts())
    with (
        pytest.raises(StartError, match=r"still waiting: the tide\. Look out"),
        console.stage("sea") as stage,
    ):
        console.wait_until_done(stage, lambda: "the tide", limit_seconds=0, advice="Look out.")
    assert "x sea" in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_first_interrupt_ends_the_wait_and_the_second_hurries() -> None:
    interrupts = Interrupts()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        interrupts.install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.requested
        assert not interrupts.hurried
        console = Console(Terminal(io.StringIO()), interrupts)
        with pytest.raises(InterruptedStartError), console.stage("sea") as stage:
            console.wait_until_done(stage, lambda: "the tide", limit_seconds=60, advice="")
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.hurried
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_closed_terminal_does_not_keep_the_fleet_from_stopping() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w")
    Terminal(broken).write("anybody there?\n")
    with pytest.raises(BrokenPipeError):
        broken.close()


def test_errand_that_is_left_is_ended_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid, flush=True); child.wait()"
    )
    with run_errand(
        "any", ("-c", code), fleet_id=f"test-{os.getpid()}", code=tmp_path, environment={}
    ) as errand:
        while not errand.last_line().isdigit():
            errand.missing()
        identity = identify(int(errand.last_line()))
        assert identity is not None
    # Killed is not reaped: whoever adopted it does that in its own time.
    deadline = time.monotonic() + 10
    while is_alive(identity):
        assert time.monotonic() < deadline, "the child outlives its errand"
        time.sleep(0.02)


def test_failed_errand_shows_the_end_of_its_output(tmp_path: Path) -> None:
    code = "import sys; print('the reason'); sys.exit(3)"
    with run_errand("any", ("-c", code), fleet_id="test", code=tmp_path, environment={}) as errand:
        errand.process.wait()
        with pytest.raises(StartError, match="the reason"):
            errand.missing()


def test_secrets_of_the_caller_do_not_reach_every_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "REDIS_URL", "EXAOPS_FLEET_SECRET", "DJANGO_SETTINGS_MODULE", "MAKEFLAGS"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/kept")
    environment = plain_environment()
    assert "hidden" not in environment.values()
    assert environment["LD_LIBRARY_PATH"] == "/kept"


def test_processes_of_a_fleet_are_found_by_label_and_its_replicas_by_node(tmp_path: Path) -> None:
    files = open_fleet_files(tmp_path / "var")
    home = files.node_home("node-1")
    home.mkdir()
    (home / "identity.json").write_text(json.dumps({"node_id": f"node-of-{files.fleet_id}"}))
    labels = (
        {"EXAOPS_FLEET": files.fleet_id, "EXAOPS_PROGRAM": "web"},
        {"EXAOPS_NODE_ID": f"node-of-{files.fleet_id}", "EXAOPS_REPLICA_ID": "r"},
        {"EXAOPS_FLEET": "another", "EXAOPS_NODE_ID": "another"},
    )
    started = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=label)
        for label in labels
    ]
    try:
        found = find_labelled(files.fleet_id, files.node_ids())
        assert [(one.identity.pid, one.program, one.is_replica) for one in sorted(found, key=str)] == [
            (started[0].pid, "web", False),
            (started[1].pid, "", True),
        ]
    finally:
        for process in started:
            process.communicate(b"\n")
        remove_runtime(files)
