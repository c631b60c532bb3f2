"""Let simulated nodes join the fleet and serve a simulated model, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from exaserve_ops.adapters.fleet_files import FleetFilesError, open_fleet_files
from exaserve_ops.adapters.processes import FLEET_VARIABLE, PROGRAM_VARIABLE, read_environment_of
from exaserve_ops.lib.errors import OpsError
from exaserve_ops.management.simulated.enrolment import Wish, ensure_nodes
from exaserve_ops.management.simulated.serving import ensure_deployment, ensure_stored_models
from exaserve_ops.management.simulated.workers import SimulationShape, run_workers, write_configs
from workers.simulation.faults import Fault, FaultScriptError, parse_fault, read_script
from workers.simulation.hardware import NONE_CUT, CutCards, read_cut_cards

MOST_NODES = 4_096
MOST_REPLICAS = 64
MOST_GIGABYTES = 2_000


class Command(BaseCommand):
    """Needs a running control plane; finds the one that `up` started in the same folder."""

    help = "Join simulated nodes that speak the real protocol, and place simulated replicas on them."
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("--nodes", type=_up_to(MOST_NODES), default=16, help="(default %(default)s)")
        parser.add_argument(
            "--replicas", type=_up_to(MOST_REPLICAS), default=12, help="on each node (default %(default)s)"
        )
        parser.add_argument(
            "--standbys", type=int, default=0, help="how many of all replicas only stand by (default 0)"
        )
        parser.add_argument(
            "--mig",
            type=_cut_cards,
            default=NONE_CUT,
            metavar="CARDS[:PROFILE+PROFILE]",
            help="further cards on each node, cut into slices, such as 2:3g.40gb+3g.40gb (default none)",
        )
        parser.add_argument(
            "--weights",
            type=_sizes,
            default=(),
            metavar="GB[,GB]",
            help="have simulated models of these sizes that nodes keep on their disks, such as 16,140",
        )
        parser.add_argument("--racks", type=_up_to(MOST_NODES), default=16, help="(default %(default)s)")
        parser.add_argument("--seed", type=int, default=1, help="decides figures and faults")
        parser.add_argument("--load", type=float, default=0.4, help="requests a second of one replica")
        parser.add_argument("--seconds", type=float, help="stop after so long")
        parser.add_argument("--faults", type=Path, help="fault script, TOML or JSON")
        parser.add_argument(
            "--fault", action="append", default=[], metavar="WORD", help="such as node-death@30s+60s"
        )
        parser.add_argument(
            "--serve",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="replicas answer chats on loopback addresses (default: yes)",
        )
        parser.add_argument("--processes", type=_up_to(64), help="(default one for each 512 nodes)")
        parser.add_argument("--no-deployment", action="store_true", help="only the nodes")
        parser.add_argument(
            "--stamp-queue", action="store_true", help="for benchmarks: queue lengths tell the time"
        )

    def handle(self, *_arguments: Any, **options: Any) -> None:  # noqa: ANN401 - Django's signature
        """Enrol, deploy, simulate."""
        if not settings.ENV.database_url:
            _start_again_inside_the_fleet()
        try:
            faults = _faults(options["faults"], options["fault"])
            files = open_fleet_files(settings.ENV.var_dir)
            wish = Wish(nodes=options["nodes"], racks=min(options["racks"], options["nodes"]))
            nodes = ensure_nodes(files, wish, settings.ENV.fleet_secret, say=self.stdout.write)
            if not options["no_deployment"]:
                places = options["nodes"] * options["replicas"]
                standbys = min(max(0, options["standbys"]), places - 1)
                self.stdout.write(ensure_deployment(replicas=places - standbys, standbys=standbys))
            if options["weights"]:
                self.stdout.write(ensure_stored_models(options["weights"]))
            shape = SimulationShape(
                # The operator runs this next to the control plane, with its secrets, and a thousand nodes
                # share a connection: users of their own would part nothing from anything.
                redis_url=settings.ENV.agent_redis_url,
                seed=options["seed"],
                slots=options["replicas"],
                cut_cards=options["mig"],
                requests_per_second=options["load"],
                faults=faults,
                serve=options["serve"],
                stamp_queue=options["stamp_queue"],
            )
            paths = write_configs(files, nodes, shape, processes=options["processes"])
        except (OpsError, FaultScriptError, FleetFilesError) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"simulating {len(nodes)} nodes in {len(paths)} processes; Ctrl-C stops them")
        self.stdout.flush()
        if not run_workers(paths, code=settings.BASE_DIR, seconds=options["seconds"]):
            raise CommandError("a simulating process ended by itself; see its messages above")


def _faults(script: Path | None, words: list[str]) -> tuple[Fault, ...]:
    return (*(read_script(script) if script else ()), *(parse_fault(word) for word in words))


def _start_again_inside_the_fleet() -> None:
    """Run this command once more, with the environment of the control plane that `up` started.

    Its secrets stand in that process's environment alone, and go nowhere but into ours.
    """
    files = open_fleet_files(settings.ENV.var_dir)
    pid = files.read_json(files.summary.name).get("pids", {}).get("controllers", 0)
    environment = read_environment_of(pid) if pid else {}
    if not environment.get("DATABASE_URL"):
        raise CommandError(
            f"no fleet is up in {files.var}: start one (`make up`), or set DATABASE_URL and the rest"
        )
    known = {
        name: value
        for name, value in environment.items()
        if name.startswith("EXAOPS_") or name in {"DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE"}
    }
    # Whoever started this stops it: it does not carry the label of what `up` takes down.
    for label in (FLEET_VARIABLE, PROGRAM_VARIABLE):
        known.pop(label, None)
    os.execve(sys.executable, [sys.executable, *sys.argv], dict(os.environ) | known)  # noqa: S606 - ourselves


def _cut_cards(text: str) -> CutCards:
    try:
        return read_cut_cards(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _sizes(text: str) -> tuple[int, ...]:
    words = [word for word in text.split(",") if word]
    if not all(word.isdecimal() and 1 <= int(word) <= MOST_GIGABYTES for word in words):
        raise argparse.ArgumentTypeError(f"give whole numbers of gigabytes up to {MOST_GIGABYTES}: 16,140")
    return tuple(map(int, words))


def _up_to(most: int) -> Any:  # noqa: ANN401 - what argparse calls a type
    def count(text: str) -> int:
        if not text.isdigit() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"give a whole number from 1 to {most}")
        return int(text)

    return count
