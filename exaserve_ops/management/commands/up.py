"""Start the whole product on this machine, and stop it with Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import psutil
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from exaserve_ops.adapters.fleet_files import (
    FleetFiles,
    FleetFilesError,
    lock_fleet,
    open_fleet_files,
)
from exaserve_ops.adapters.stores import StoreError
from exaserve_ops.adapters.supervision import SupervisionError
from exaserve_ops.management.allinone.bring_up import bring_up
from exaserve_ops.management.allinone.console import (
    Console,
    InterruptedStartError,
    Interrupts,
    StartError,
    Terminal,
)
from exaserve_ops.management.allinone.fleet import (
    INFERENCE_KEY,
    Fleet,
    assemble_fleet,
    start_process_manager,
)
from exaserve_ops.management.allinone.programs import NODE_PREFIX, FleetShape
from exaserve_ops.management.allinone.readiness import DEMO
from exaserve_ops.management.allinone.watch import watch
from exaserve_ops.management.allinone.wind_down import clear_earlier_run, wind_down

DEFAULT_NODES = 2
DEFAULT_REPLICAS_PER_NODE = 2
MOST_NODES = 64

_FAILURES = (StartError, StoreError, SupervisionError, FleetFilesError)


class Command(BaseCommand):
    """The all-in-one fleet. It needs no database before it has started one."""

    help = "Start stores, control plane, gateway and node agents here; stop all with Ctrl-C."
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument(
            "--nodes",
            type=_count_or_none,
            help=f"node agents on this machine; 0 for none (as before, or {DEFAULT_NODES})",
        )
        parser.add_argument(
            "--replicas",
            type=_count,
            default=DEFAULT_REPLICAS_PER_NODE,
            help="replicas on each node when the demo deployment is made (default %(default)s)",
        )
        parser.add_argument("--load", action="store_true", help="keep a few chats going")
        parser.add_argument("--no-demo", action="store_true", help="no demo model, no deployment")

    def handle(self, *_arguments: Any, **options: Any) -> None:  # noqa: ANN401 - Django's signature
        """Start, watch, stop. Ends with 1 if the fleet could not be started or lost its manager."""
        interrupts = Interrupts()
        interrupts.install()
        console = Console(Terminal(sys.stdout), interrupts)
        try:
            files = open_fleet_files(settings.ENV.var_dir)
            with lock_fleet(files):
                self._run(files, console, interrupts, options)
        except _FAILURES as error:
            raise CommandError(str(error)) from error

    def _run(
        self, files: FleetFiles, console: Console, interrupts: Interrupts, options: dict[str, Any]
    ) -> None:
        files.summary.unlink(missing_ok=True)
        clear_earlier_run(files, console, interrupts)
        shape = _shape(files, options)
        console.say(f"Starting {shape.nodes} nodes; everything is kept in {files.var}")
        with console.stage("preparing"):
            fleet = assemble_fleet(files, shape, console, interrupts, code=settings.BASE_DIR)
        intact = True
        try:
            start_process_manager(fleet)
            bring_up(fleet)
            console.say(_summary(fleet))
            intact = watch(fleet)
        except InterruptedStartError:
            pass
        finally:
            console.say("\nStopping (once more: at once) ...")
            wind_down(files, console, interrupts, fleet.site.homes, settings.BASE_DIR)
            console.say("Stopped; nothing is left running. The data is kept.")
        if not intact:
            raise StartError("the process manager ended by itself, so everything was stopped")


def _shape(files: FleetFiles, options: dict[str, Any]) -> FleetShape:
    known = sum(1 for home in (files.var / "nodes").glob(f"{NODE_PREFIX}*") if home.is_dir())
    with_demo = not options["no_demo"] and options["nodes"] != 0
    return FleetShape(
        nodes=options["nodes"] if options["nodes"] is not None else known or DEFAULT_NODES,
        replicas_per_node=options["replicas"],
        with_demo=with_demo,
        with_load=bool(options["load"]) and with_demo,
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
    )


def _summary(fleet: Fleet) -> str:
    password_file = fleet.files.secret_path("admin_password")
    shown = _first_showing(password_file)
    lines = [
        "",
        f"  Page      {fleet.addresses.public_url}",
        f"  Sign in   admin  {shown}",
        f"  Gateway   {fleet.addresses.gateway_url}",
    ]
    if fleet.shape.with_demo:
        key_file = fleet.files.secret_path(INFERENCE_KEY)
        body = (
            f'{{"model": "{DEMO}", "stream": true, "max_tokens": 64,'
            ' "messages": [{"role": "user", "content": "Hello"}]}'
        )
        lines += [
            "",
            "  Try it:",
            f"  curl -N {fleet.addresses.gateway_url}/v1/chat/completions \\",
            f"    -H \"Authorization: Bearer $(cat '{key_file}')\" \\",
            f"    -H 'Content-Type: application/json' -d '{body}'",
        ]
    return "\n".join([*lines, "", "Ready. Ctrl-C stops everything."])


def _first_showing(password_file: Path) -> str:
    """Return the password the first time, later only where it is kept."""
    shown_before = password_file.with_suffix(".shown")
    if shown_before.exists():
        return f"(password in {password_file})"
    shown_before.touch(mode=0o600)
    return password_file.read_text().strip()


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MOST_NODES:
        raise argparse.ArgumentTypeError(f"give a whole number from 1 to {MOST_NODES}")
    return int(text)
