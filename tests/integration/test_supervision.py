"""The process manager: what it restarts, what it is told, and what it must never be told."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exaserve_ops.adapters.fleet_files import (
    AlreadyRunningError,
    FleetFiles,
    FleetFilesError,
    choose_port,
    lock_fleet,
    open_fleet_files,
    remove_runtime,
)
from exaserve_ops.adapters.processes import ProcessIdentity, end_processes, identify, reap
from exaserve_ops.adapters.supervision import (
    Program,
    ProgramState,
    SupervisionError,
    Supervisor,
    control_socket,
    render_config,
    start_supervisord,
    write_config,
)

DEADLINE_SECONDS = 30


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"still waiting: {what}"
        time.sleep(0.05)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FleetFiles]:
    files = open_fleet_files(tmp_path / "var")
    yield files
    remove_runtime(files)


@pytest.fixture
def supervise(files: FleetFiles) -> Iterator[Callable[[Program], Supervisor]]:
    started: list[ProcessIdentity] = []

    def start(program: Program) -> Supervisor:
        control = control_socket(files)
        text = render_config([program], files, control, as_root=os.geteuid() == 0)
        manager = identify(start_supervisord(write_config(files, text), dict(os.environ)))
        assert manager is not None
        started.append(manager)
        supervisor = Supervisor(control)
        wait_until(supervisor.is_answering, "supervisord")
        supervisor.start(program.name)
        return supervisor

    yield start
    end_processes(started, patience_seconds=DEADLINE_SECONDS)
    for manager in started:
        reap(manager.pid)


def test_program_that_does_not_come_up_is_tried_again_until_it_does(
    files: FleetFiles, supervise: Callable[[Program], Supervisor]
) -> None:
    key = files.var / "key"
    supervisor = supervise(Program("late", ("/bin/sh", "-c", f"cat '{key}' && exec sleep 60")))

    wait_until(lambda: supervisor.statuses()["late"].state is ProgramState.BACKOFF, "a first failure")
    key.touch()
    wait_until(lambda: supervisor.statuses()["late"].state is ProgramState.RUNNING, "another try")

    supervisor.stop("late")
    wait_until(lambda: supervisor.statuses()["late"].state.is_down, "the stop")


def test_program_that_ignores_the_request_to_stop_is_killed(
    supervise: Callable[[Program], Supervisor],
) -> None:
    deaf = Program("deaf", ("/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"), stop_seconds=1)
    supervisor = supervise(deaf)
    wait_until(lambda: supervisor.statuses()["deaf"].state is ProgramState.RUNNING, "the start")
    supervisor.stop("deaf")
    wait_until(lambda: supervisor.statuses()["deaf"].state.is_down, "the kill")


def test_program_sees_its_environment_to_the_letter(
    files: FleetFiles, supervise: Callable[[Program], Supervisor]
) -> None:
    odd = "postgresql://u:p%40s%3B@/db?host=/a%2Fb, c=d\\e"
    seen = files.var / "seen"
    command = ("/bin/sh", "-c", f"printf %s \"$ODD\" > '{seen}'; exec sleep 60")
    supervise(Program("odd", command, {"ODD": odd}))
    wait_until(lambda: seen.exists() and seen.read_text(), "the program")
    assert seen.read_text() == odd


def test_value_that_cannot_be_passed_on_is_refused_without_being_told(files: FleetFiles) -> None:
    program = Program("any", ("true",), {"DATABASE_URL": 'secret" ; [program:evil]'})
    with pytest.raises(SupervisionError, match="DATABASE_URL") as caught:
        render_config([program], files, control_socket(files), as_root=False)
    assert "secret" not in str(caught.value)


def test_command_cannot_smuggle_in_a_section(files: FleetFiles) -> None:
    with pytest.raises(SupervisionError):
        render_config(
            [Program("any", ("echo", "x\n[program:evil]"))], files, control_socket(files), as_root=False
        )


def test_secret_is_made_once_and_kept_private(files: FleetFiles) -> None:
    first = files.secret("any")
    assert open_fleet_files(files.var).secret("any") == first
    assert files.secret_path("any").stat().st_mode & 0o777 == 0o600


def test_fleet_can_be_claimed_once_and_again_when_let_go(files: FleetFiles) -> None:
    with lock_fleet(files), pytest.raises(AlreadyRunningError, match=str(os.getpid())):
        lock_fleet(files)
    lock_fleet(files).close()


def test_port_is_kept_while_it_is_free(files: FleetFiles) -> None:
    port = choose_port(files, "web")
    assert choose_port(files, "web") == port
    assert choose_port(files, "gateway") != port


def test_taken_port_is_replaced_unless_somebody_asked_for_it(files: FleetFiles) -> None:
    port = choose_port(files, "web")
    with socket.create_server(("127.0.0.1", port)):
        assert choose_port(files, "web") != port
        with pytest.raises(FleetFilesError, match="taken"):
            choose_port(files, "web", wanted=str(port))
    with pytest.raises(FleetFilesError, match="1 to 65535"):
        choose_port(files, "web", wanted="70000")


def test_runtime_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as base:  # short, unlike `tmp_path`
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        runtime = open_fleet_files(tmp_path / "var").runtime
        assert runtime.parent == Path(base)
        runtime.rmdir()
        runtime.symlink_to(tmp_path)  # a trap: a link to where others can read
        with pytest.raises(FleetFilesError, match="belongs to somebody else"):
            open_fleet_files(tmp_path / "var")
