"""Scripts and files on a machine, over one connection: results checked, waits bounded, files put whole."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import paramiko

from exaserve_ops.adapters.ssh_connection import CommandResult, Connection, LostConnectionError, clean
from exaserve_ops.inventory.domain.installation import StepFailedError

MIB = 1 << 20
FILE_BLOCK_BYTES = 256 * 1024
SNIPPET_SECONDS = 60.0
_DF_LINE = re.compile(r"\s(\d+)\s+\d+%\s")


class SlowCommandError(StepFailedError):
    """A command was given up at its deadline."""


class RemoteShell:
    """Runs scripts and puts files; `log` is called with what the machine says, as it comes."""

    def __init__(self, connection: Connection, log: Callable[[str], None]) -> None:
        self._connection = connection
        self._log = log

    def script(self, script: str, *arguments: str, seconds: float = 30.0) -> CommandResult:
        """Run a shell script with arguments, which are quoted. Raises `StepFailedError` at its deadline."""
        return self._finish(shlex.join(["/bin/sh", "-s", "--", *arguments]), script, seconds)

    def snippet(self, python: str, code: str, *arguments: str, text: str = "") -> CommandResult:
        """Run a snippet with an interpreter of the machine; `text` is its standard input."""
        command = shlex.join([python, "-c", code, *arguments])
        return self._finish(command, text, SNIPPET_SECONDS)

    def _finish(self, command: str, text: str, seconds: float) -> CommandResult:
        result = self._connection.run(command, text=text, seconds=seconds, sink=self._log)
        if result.timed_out:
            raise SlowCommandError(f"the machine took longer than {seconds:.0f} s; it was given up")
        if result.status is None:
            raise LostConnectionError("how the command ended is unknown: the connection broke first")
        return result

    def must(self, result: CommandResult, what: str) -> None:
        """Raise `StepFailedError` where a command did not end well; `what` says what that means."""
        if not result.succeeded:
            full = "No space left on device" in result.errors + result.output
            advice = ". The disk is full: make room, then try again" if full else ""
            raise StepFailedError(f"{what}: {result.complaint or f'status {result.status}'}{advice}")

    def json(self, result: CommandResult) -> dict[str, Any]:
        """The last line of an output, as an object. Raises `StepFailedError`."""
        self.must(result, "the machine cannot be examined")
        try:
            found = json.loads(result.output.strip().split("\n")[-1])
        except ValueError as error:
            raise StepFailedError(f"the machine's answer cannot be read: {result.complaint}") from error
        return found if isinstance(found, dict) else {}

    # -- files -------------------------------------------------------------------------------------
    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return self.size(path) is not None

    def size(self, path: str) -> int | None:
        """Bytes of a file; `None` where there is none."""
        try:
            return self._connection.files.stat(path).st_size
        except FileNotFoundError:
            return None
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._file_failure(path, error) from error

    def put(self, path: str, data: bytes) -> None:
        """Put a file there, closed to others."""
        self._send(path, iter([data]))

    def put_file(self, path: str, source: Path) -> None:
        """Copy a file there."""
        with source.open("rb") as file:
            self._send(path, iter(lambda: file.read(FILE_BLOCK_BYTES), b""))

    def _send(self, path: str, blocks: Iterator[bytes]) -> None:
        """Write a file, closed to others before its first byte, and put it in place when it is whole."""
        draft = f"{path}.part"
        try:
            files = self._connection.files
            with files.open(draft, "wb") as file:
                file.chmod(0o600)
                file.set_pipelined(pipelined=True)
                for block in blocks:
                    file.write(block)
            files.posix_rename(draft, path)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._file_failure(path, error) from error

    def _file_failure(self, path: str, error: Exception) -> StepFailedError:
        if not self._connection.is_alive:
            return LostConnectionError(f"the connection was lost while {posixpath.basename(path)} was sent")
        with suppress(StepFailedError):
            said = self.script(f"df -Pk {shlex.quote(posixpath.dirname(path))} | tail -n 1\n")
            free = free_bytes(said.output)
            if free is not None and free < MIB:
                name, folder = posixpath.basename(path), posixpath.dirname(path)
                return StepFailedError(
                    f"the disk is full: {name} does not fit into {folder}. Make room, then try again"
                )
        return StepFailedError(f"{path} cannot be written: {clean(str(error))[:200]}")


def free_bytes(df_line: str) -> int | None:
    """Free bytes in a line of `df -Pk`; `None` where it says nothing that can be read."""
    match = _DF_LINE.search(df_line)
    return int(match[1]) * 1024 if match else None
