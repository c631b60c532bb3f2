"""The end of a fleet: everything in order, nothing left behind."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from exaserve_ops.adapters.fleet_files import FleetFiles, remove_runtime
from exaserve_ops.adapters.processes import (
    LabelledProcess,
    ProcessIdentity,
    end_processes,
    find_labelled,
    is_alive,
    reap,
)
from exaserve_ops.adapters.supervision import (
    SupervisionError,
    Supervisor,
    control_socket,
)
from exaserve_ops.management.allinone import programs
from exaserve_ops.management.allinone.console import POLL_SECONDS, Console, Interrupts, Stage
from exaserve_ops.management.allinone.errands import run_errand
from exaserve_ops.management.allinone.fleet import SUPERVISORD_STATE

_STAGE_SECONDS = 70
_HURRIED_SECONDS = 3
_REPLICAS_SECONDS = 60
_STORES = (programs.VALKEY, programs.POSTGRES)


def wind_down(
    files: FleetFiles, console: Console, interrupts: Interrupts, homes: Mapping[str, Path], code: Path
) -> None:
    """Stop a fleet in order: first who asks, last who keeps; then whatever is left."""
    supervisor = Supervisor(control_socket(files))
    names = _known_programs(supervisor)
    for stage_names in programs.stop_stages(names):
        _stop_stage(supervisor, console, interrupts, stage_names)
        if any(name.startswith(programs.AGENT_PREFIX) for name in stage_names):
            _stop_replicas(files, console, interrupts, homes, code)
    if not names:
        _stop_replicas(files, console, interrupts, homes, code)
    _end_supervisord(files, supervisor)
    end_leftovers(files, interrupts, with_replicas=True)
    files.summary.unlink(missing_ok=True)
    remove_runtime(files)


def clear_earlier_run(files: FleetFiles, console: Console, interrupts: Interrupts) -> None:
    """Stop what an `up` that was killed left running. Replicas stay: their agents adopt them."""
    left = [process for process in find_labelled(files.fleet_id) if not process.is_replica]
    if not left:
        return
    console.say(
        f"An earlier run of this fleet was killed and left {len(left)} processes running"
        f" ({', '.join(sorted({process.program for process in left}))}). Stopping them first:"
    )
    supervisor = Supervisor(control_socket(files))
    for names in programs.stop_stages(_known_programs(supervisor)):
        _stop_stage(supervisor, console, interrupts, names)
    _end_supervisord(files, supervisor)
    end_leftovers(files, interrupts, with_replicas=False)
    console.say()


def end_leftovers(files: FleetFiles, interrupts: Interrupts, *, with_replicas: bool) -> None:
    """End every process that carries this fleet's label, the stores last."""
    labelled = find_labelled(files.fleet_id, files.node_ids())
    found = [process for process in labelled if with_replicas or not process.is_replica]
    others = [process for process in found if process.program not in _STORES]
    _end(others, signal.SIGTERM, interrupts)
    # To Postgres, SIGTERM would mean: wait for every client to go away.
    _end([process for process in found if process.program in _STORES], signal.SIGINT, interrupts)


def _stop_stage(
    supervisor: Supervisor, console: Console, interrupts: Interrupts, names: tuple[str, ...]
) -> None:
    running = tuple(name for name in names if name in _running(supervisor))
    if not running:
        return
    with console.stage(", ".join(running)) as stage, contextlib.suppress(SupervisionError):
        stage.outcome = "stopped"
        _await(stage, interrupts, lambda: _stop(supervisor, running), _STAGE_SECONDS)
        for name in _running(supervisor) & set(running) - set(_STORES):
            supervisor.signal(name, "KILL")
            stage.outcome = "killed"


def _stop(supervisor: Supervisor, names: tuple[str, ...]) -> set[str]:
    """Ask them to stop and return those that have not yet.

    Asked again each time, since what is between two lives at the moment would miss it.
    """
    for name in names:
        supervisor.stop(name)
    return _running(supervisor) & set(names)


def _stop_replicas(
    files: FleetFiles,
    console: Console,
    interrupts: Interrupts,
    homes: Mapping[str, Path],
    code: Path,
) -> None:
    joined = {name: home for name, home in homes.items() if (home / "identity.json").exists()}
    if not joined:
        return
    with console.stage("replicas") as stage, contextlib.ExitStack() as errands:
        stage.outcome = "stopped"
        running = [
            errands.enter_context(
                run_errand(
                    f"stop replicas of {name}",
                    ("-m", "workers.agent", "stop-replicas", "--home", str(home)),
                    fleet_id=files.fleet_id,
                    code=code,
                    environment={},
                )
            )
            for name, home in joined.items()
        ]
        _await(
            stage,
            interrupts,
            lambda: {errand.name for errand in running if errand.process.poll() is None},
            _REPLICAS_SECONDS,
        )
        failed = [errand for errand in running if errand.process.poll() != 0]
        if failed:
            stage.outcome = "\n".join(f"{one.name} did not end well:\n{one.text()}" for one in failed)


def _end_supervisord(files: FleetFiles, supervisor: Supervisor) -> None:
    with contextlib.suppress(SupervisionError):
        supervisor.shut_down()
    state = files.read_json(SUPERVISORD_STATE)
    if state:
        identity = ProcessIdentity(state["pid"], state["start_ticks"], state["boot_id"])
        end_processes([identity], patience_seconds=_STAGE_SECONDS)
        _await_end(identity)
        reap(identity.pid)
    (files.var / SUPERVISORD_STATE).unlink(missing_ok=True)


def _await_end(identity: ProcessIdentity) -> None:
    deadline = time.monotonic() + _HURRIED_SECONDS
    while is_alive(identity) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _await(stage: Stage, interrupts: Interrupts, left: Callable[[], set[str]], limit_seconds: float) -> None:
    while names := left():
        if interrupts.hurried or stage.elapsed_seconds > limit_seconds:
            return
        stage.wait(", ".join(sorted(names)))
        time.sleep(POLL_SECONDS)


def _end(processes: Iterable[LabelledProcess], which: signal.Signals, interrupts: Interrupts) -> None:
    end_processes(
        [process.identity for process in processes],
        stop_signal=which,
        patience_seconds=20,
        is_hurried=lambda: interrupts.hurried,
    )


def _known_programs(supervisor: Supervisor) -> tuple[str, ...]:
    try:
        return tuple(supervisor.statuses())
    except SupervisionError:
        return ()


def _running(supervisor: Supervisor) -> set[str]:
    """Names of programs that have a process or will have one."""
    try:
        statuses = supervisor.statuses().values()
    except SupervisionError:
        return set()
    return {status.name for status in statuses if not status.state.is_down}
