"""How much memory a replica is said to take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from workers.agent.footprints import Footprints
from workers.agent.journal import AttemptRow
from workers.probes.devices import AcceleratorProcess

MIB = 1 << 20
HOLDER = "import os; kept = bytearray(b'x') * (64 << 20); os.write(1, b'up' + bytes([10])); input()"
FORKER = (
    "import os; kept = bytearray(b'x') * (64 << 20); os.fork(); os.write(1, b'up' + bytes([10])); input()"
)


@contextmanager
def session(program: str, lines: int = 1) -> Iterator[int]:
    """A process that leads a session of its own, and holds 64 MiB."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline() == "up\n"
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()


def attempt(replica_id: str, pid: int | None) -> AttemptRow:
    return AttemptRow(
        replica_id=replica_id,
        attempt=1,
        generation=1,
        launch_digest="",
        engine="torch",
        ports=(),
        host="127.0.0.1",
        runtime_dir="",
        log_file="",
        launched_at=0.0,
        pid=pid,
    )


def test_replica_on_a_cpu_takes_what_its_processes_hold() -> None:
    with session(HOLDER) as pid:
        seen = Footprints(
            lambda: [attempt("r1", pid), attempt("r2", None)], lambda: {"r1": False, "r2": False}
        )
        seen.take([])
        assert 64 * MIB < seen.used_bytes["r1"] < 256 * MIB
        assert set(seen.used_bytes) == {"r1"}


def test_memory_that_processes_share_counts_once() -> None:
    with session(FORKER, lines=2) as pid:
        seen = Footprints(lambda: [attempt("r1", pid)], lambda: {"r1": False})
        seen.take([])
        assert 64 * MIB < seen.used_bytes["r1"] < 120 * MIB


def test_replica_on_cards_takes_what_all_of_them_say() -> None:
    with session(HOLDER) as pid, session(HOLDER) as other:
        seen = Footprints(lambda: [attempt("r1", pid)], lambda: {"r1": True})
        on_cards = [
            AcceleratorProcess("GPU-a", pid, 3 * MIB),
            AcceleratorProcess("GPU-b", pid, 4 * MIB),
            AcceleratorProcess("GPU-c", pid, None),
            AcceleratorProcess("GPU-a", other, 5 * MIB),
        ]
        seen.take(on_cards)
        assert seen.used_bytes == {"r1": 7 * MIB}


def test_replica_on_cards_that_holds_nothing_yet_is_not_known() -> None:
    with session(HOLDER) as pid:
        seen = Footprints(lambda: [attempt("r1", pid)], lambda: {"r1": True})
        seen.take([])
        assert seen.used_bytes == {}
        gone = Footprints(lambda: [attempt("r1", 4_194_303)], lambda: {"r1": False})
        gone.take([])
        assert gone.used_bytes == {}
