"""`python -m bench.relocation --json`: what moving a conversation costs, and what its breaking costs.

Three parts (`--only` picks one; all by default):

`figures`  On an otherwise idle machine: bytes and milliseconds of a move within a node's memory and over
           TCP, against what memory and the loopback carry in the same run; and the time to the first token
           of the next turn after a move, where it stayed, and computed again.
`kills`    Moves, each followed by a turn that is compared token by token with a twin that never moved,
           while what takes part dies at random steps. `real` and `played` in the output say what was the
           product's own and really killed, and whose part was played by the benchmark.
`product`  The same on a whole fleet of this machine, started by `manage.py up`: a few hundred moves that
           are asked for through the API, while real processes of all kinds get SIGKILL. Nothing is played.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.fleet_run import FleetRunError
from bench.relocation import figures, kills, product
from bench.relocation.house import HouseError
from bench.relocation.wire import UnansweredError

_SUMS = ("moves", "wrong_turns", "lost_sessions")
PARTS = ("figures", "kills", "product")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if a turn was wrong or a session lost, or if it could not be measured."""
    parser = argparse.ArgumentParser(prog="bench.relocation", description="What moving conversations costs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be repeated")
    parser.add_argument("--tokens", type=int, default=3000, help="context of a session whose move is timed")
    parser.add_argument("--sessions", type=int, default=5, help="whose moves are timed, each way")
    parser.add_argument("--moves", type=int, default=10_000, help="under kills")
    parser.add_argument("--product-moves", type=int, default=300, help="of the whole fleet")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    try:
        report = _measure(arguments)
    except (FleetRunError, HouseError, UnansweredError) as error:
        print(f"bench.relocation: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=None if arguments.json else 2))
    return 1 if report.get("wrong_turns") or report.get("lost_sessions") else 0


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    parts = arguments.only or PARTS
    report: dict[str, Any] = {"load1_before": round(os.getloadavg()[0], 2), "cpu_count": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="bench-relocation-") as name:
        folder = Path(name)
        if "figures" in parts:
            report["figures"] = asyncio.run(
                figures.measure(folder, tokens=arguments.tokens, sessions=arguments.sessions)
            )
        if "kills" in parts:
            plan = kills.Plan(arguments.moves, seed=arguments.seed)
            report["kills"] = asyncio.run(kills.measure(folder, plan))
        if "product" in parts:
            moved = product.Plan(arguments.product_moves, seed=arguments.seed)
            report["product"] = asyncio.run(product.measure(folder, moved))
    killed = [report[part] for part in ("kills", "product") if part in report]
    return report | ({key: sum(part[key] for part in killed) for key in _SUMS} if killed else {})


if __name__ == "__main__":
    sys.exit(main())
