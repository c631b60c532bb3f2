"""A fleet that a benchmark or a test starts the way a person does, uses, and stops with Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.chat_client import ChatClient
from exaserve_ops.adapters.fleet_files import FleetFiles
from exaserve_ops.adapters.processes import LabelledProcess, find_labelled

START_SECONDS = 300.0
STOP_SECONDS = 120.0
POLL_SECONDS = 0.05


class FleetRunError(Exception):
    """The fleet did not do what was expected in time; the message holds the end of its output."""


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A running `manage.py up`, with what it wrote into up.json."""

    process: subprocess.Popen[bytes]
    output: Path
    var: Path

    def summary(self) -> dict[str, Any]:
        """Return the content of up.json, as it is now."""
        content: dict[str, Any] = json.loads((self.var / "up.json").read_text())
        return content

    def text(self) -> str:
        """Return what the command has printed so far."""
        return self.output.read_text(errors="replace")

    def chat(self) -> ChatClient:
        """Return a client of the gateway."""
        summary = self.summary()
        return ChatClient(summary["gateway_url"], summary["api_token"], summary["model"])

    def get(self, path: str) -> Any:  # noqa: ANN401 - whatever JSON the API answers with
        """Return the API's JSON answer."""
        summary = self.summary()
        request = urllib.request.Request(  # noqa: S310 - http, to the fleet that we started
            summary["web_url"] + path, headers={"Authorization": f"Bearer {summary['api_token']}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - as above
            return json.loads(answer.read())

    def replicas(self) -> list[dict[str, Any]]:
        """Return the live replicas of the demo."""
        results: list[dict[str, Any]] = self.get("/api/v1/replicas?page_size=500")["results"]
        return results

    def wait_until(self, condition: Callable[[], object], what: str, *, seconds: float = 60.0) -> None:
        """Wait for a condition; an unanswered question counts as not yet. Raises `FleetRunError`."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError, ValueError):
                if condition():
                    return
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise FleetRunError(f"still waiting: {what}\n{self.text()[-3000:]}")
            time.sleep(POLL_SECONDS)

    def stop(self, which: signal.Signals = signal.SIGINT) -> int:
        """Ask it to stop and return its exit code. Raises `FleetRunError` if it does not end."""
        self.process.send_signal(which)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise FleetRunError(f"it does not stop\n{self.text()[-3000:]}") from None


def start_fleet(
    code: Path, var: Path, *options: str, environment: Mapping[str, str] | None = None
) -> FleetRun:
    """Start a fleet from this code with its data in `var`; returns at once."""
    # A folder that the fleet does not own, since it may be started again.
    output = var.parent / f"{var.name}.output"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("EXAOPS_", "DJANGO_"))}
    for name in ("DATABASE_URL", "REDIS_URL"):
        own.pop(name, None)
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "up", *options],
            cwd=code,
            env=own | {"EXAOPS_VAR_DIR": str(var)} | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return FleetRun(process, output, var)


def wait_until_up(run: FleetRun, *, seconds: float = START_SECONDS) -> None:
    """Wait until it says that it is ready. Raises `FleetRunError`."""
    # One that was killed leaves its file behind, so whose it is matters.
    run.wait_until(
        lambda: run.summary()["pids"]["up"] == run.process.pid, "the fleet to come up", seconds=seconds
    )


@contextlib.contextmanager
def fleet_up(
    code: Path, var: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[FleetRun]:
    """Start a fleet, wait until it is up, and stop it on leaving."""
    run = start_fleet(code, var, *options, environment=environment)
    try:
        wait_until_up(run)
        yield run
    finally:
        if run.process.poll() is None:
            run.stop()


def leftovers(var: Path) -> tuple[LabelledProcess, ...]:
    """Return every process that belongs to the fleet in `var`, its replicas included."""
    files = FleetFiles(var, var)
    return find_labelled(files.fleet_id, files.node_ids())
