"""Short-lived processes of the start and the stop: each does one thing and reports on its output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from exaserve_ops.adapters.processes import FLEET_VARIABLE, PROGRAM_VARIABLE
from exaserve_ops.management.allinone.console import StartError

_SHOWN_LINES = 15
_OURS = ("EXAOPS_", "DJANGO_", "MAKE", "MFLAGS")
_OURS_EXACTLY = ("DATABASE_URL", "REDIS_URL")


def plain_environment() -> dict[str, str]:
    """Return our environment without what only some programs may know."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OURS) and name not in _OURS_EXACTLY
    }


@dataclass(frozen=True, slots=True)
class Errand:
    """A running process that is expected to end soon."""

    name: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def missing(self) -> str:
        """Return what is awaited; nothing once it is done. Raises `StartError` if it failed."""
        code = self.process.poll()
        if code is None:
            return self.last_line() or "started"
        if code != 0:
            raise StartError(f"{self.name} failed:\n{self.text()}")
        return ""

    def text(self) -> str:
        """Return the end of what it wrote."""
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-_SHOWN_LINES:])

    def last_line(self) -> str:
        """Return the newest line it wrote."""
        return self.text().rpartition("\n")[2].strip()


@contextlib.contextmanager
def run_errand(
    name: str, arguments: tuple[str, ...], *, fleet_id: str, code: Path, environment: Mapping[str, str]
) -> Iterator[Errand]:
    """Run our interpreter with these arguments, out of reach of Ctrl-C; end it on leaving."""
    label = {FLEET_VARIABLE: fleet_id, PROGRAM_VARIABLE: name}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
            [sys.executable, *arguments],
            cwd=code,
            env=plain_environment() | dict(environment) | label,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield Errand(name, process, output)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
