"""The two small C programs of this benchmark: compiled, started, asked. And what a process tree costs."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
PROXY_CORE = 0
LOAD_CORE = 1
_START_SECONDS = 60.0
_PATIENCE_SECONDS = 30.0


class ProgramError(Exception):
    """Something that the benchmark needs is missing or failed; the message says what."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What one run of the load program saw."""

    requests: int
    failed: int
    requests_per_second: float
    first_p50_us: float
    first_p99_us: float
    whole_p50_us: float
    whole_p99_us: float
    all_requests: int
    """The warm-up included."""


def compile_program(name: str, folder: Path) -> Path:
    """Compile one of the C programs beside this file. Raises `ProgramError`."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        raise ProgramError("a C compiler is needed (gcc, cc or clang)")
    target = folder / name
    done = subprocess.run(
        [compiler, "-O2", "-o", str(target), str(HERE / f"{name}.c")],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise ProgramError(f"{name}.c does not compile: {done.stderr.strip()}")
    return target


def free_port() -> int:
    """Return a port that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def pinned(core: int, command: Sequence[str]) -> list[str]:
    """Return a command that runs on one core, where there is more than one."""
    cores = psutil.cpu_count() or 1
    taskset = shutil.which("taskset")
    return list(command) if cores == 1 or taskset is None else [taskset, "-c", str(core % cores), *command]


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program for as long as the block lasts, its whole tree no longer. Raises `ProgramError`."""
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **options,  # type: ignore[call-overload]  # env and cwd, as they are
            )
        except OSError as error:
            raise ProgramError(f"{command[0]} cannot be started: {error}") from error
    try:
        yield process
    finally:
        tree = _tree(process.pid)
        for one in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(_START_SECONDS)


def wait_for_port(port: int, process: subprocess.Popen[bytes], seconds: float = _START_SECONDS) -> None:
    """Wait until something listens. Raises `ProgramError`."""
    deadline = time.monotonic() + seconds
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            raise ProgramError(f"ended with {process.returncode} before it listened")
        if time.monotonic() > deadline:
            raise ProgramError(f"does not listen after {seconds:.0f} s")
        time.sleep(0.05)


def run_load(program: Path, port: int, connections: int, seconds: float, request: Sequence[str]) -> Burst:
    """Load one port; `request` is how many sessions, the body and the key. Raises `ProgramError`."""
    command = pinned(LOAD_CORE, [str(program), str(port), str(connections), str(seconds), *request])
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=seconds + _PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ProgramError("the load did not end") from error
    if done.returncode != 0:
        raise ProgramError(f"the load failed: {done.stderr.strip()}")
    everything, requests, failed, microseconds, *times = map(int, done.stdout.split())
    first_p50, first_p99, whole_p50, whole_p99 = map(float, times)
    rate = requests * 1e6 / max(1, microseconds)
    return Burst(requests, failed, rate, first_p50, first_p99, whole_p50, whole_p99, everything)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants so far, to the nanosecond where the kernel says it."""
    return sum(_cpu_seconds(one) for one in _tree(pid))


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        threads = list(Path(f"/proc/{process.pid}/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except (OSError, ValueError, IndexError):
        pass
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
