"""Runs one engine and outlives the agent, so that an engine's end is always known.

Started as `python -I -S shim.py RUNTIME_DIR PROGRAM ARGUMENT...` as the leader of a new session.
It forwards SIGTERM to the engine, writes `exit.json` when the engine has ended, kills whatever the
engine left behind, and ends only when nothing of it is left. Standard library only, and little of
it: one of these runs beside every replica.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # without the import of typing, which every shim would pay for
    from collections.abc import Callable

_PR_SET_CHILD_SUBREAPER = 36
_SPAWN_FAILED = 127
_POLL_SECONDS = 0.05
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Run the engine to its end and clean up after it. Returns the shim's own exit code."""
    runtime_dir, argv = arguments[0], arguments[1:]

    def spawn() -> int:
        return os.posix_spawnp(
            argv[0],
            argv,
            os.environ,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores both; an engine must not
        )

    return supervise(runtime_dir, spawn)


def supervise(runtime_dir: str, spawn: Callable[[], int]) -> int:
    """Start the engine by `spawn`, which returns its pid, and see it to its end. Returns 0.

    `spawn` is called with SIGTERM, SIGINT and SIGHUP blocked; the engine must start with none blocked.
    """
    # Orphans of the engine become children of the shim instead of process 1: found, reaped, killed.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started = time.monotonic()
    # A signal that comes before the engine exists waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        engine = spawn()
    except OSError as error:
        sys.stderr.write(f"cannot start {error.filename or 'the engine'}: {error.strerror}\n")
        _write_exit(runtime_dir, _SPAWN_FAILED, None, time.monotonic() - started)
        return 0
    _write(f"{runtime_dir}/engine.pid", str(engine))
    for number in _FORWARDED:
        signal.signal(number, lambda number, _frame: _send(engine, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)

    status = _wait_for(engine)
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)  # the engine's pid may soon be another process's
    code = os.waitstatus_to_exitcode(status)
    _write_exit(
        runtime_dir,
        code if code >= 0 else None,
        -code if code < 0 else None,
        time.monotonic() - started,
    )
    _kill_leftovers()
    return 0


def _wait_for(engine: int) -> int:
    """Reap children until the engine itself has ended; return its wait status."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == engine:
            return status


def _kill_leftovers() -> None:
    """Kill children and session members until none is left, however long one takes to die."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            if not _leftovers():
                return
        for pid in _leftovers():
            _send(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _leftovers() -> list[int]:
    """Living processes of this session, and adopted ones that made a session of their own."""
    me = os.getpid()
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208 - pathlib would double the shim's start time
        if not entry.isdigit() or int(entry) == me:
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123 - as above
                state, parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
        except OSError:
            continue  # it ended between the listing and the reading
        if state not in b"ZX" and me in (int(parent), int(session)):
            found.append(int(entry))
    return found


def _send(pid: int, number: int) -> None:
    try:  # noqa: SIM105 - contextlib is one more import to start with
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # already gone, which is what was wanted


def _write_exit(runtime_dir: str, code: int | None, number: int | None, duration_seconds: float) -> None:
    facts = {"code": code, "signal": number, "duration_seconds": round(duration_seconds, 3)}
    _write(f"{runtime_dir}/exit.json", json.dumps(facts))


def _write(path: str, text: str) -> None:
    """Write a small file that appears whole or not at all."""
    try:
        with open(f"{path}.new", "w", encoding="ascii") as file:  # noqa: PTH123 - no pathlib here
            file.write(text)
        os.replace(f"{path}.new", path)  # noqa: PTH105 - no pathlib here
    except OSError as error:
        # A full disk must not keep the leftovers alive; the agent reports an unknown exit then.
        sys.stderr.write(f"cannot write {path}: {error.strerror}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
