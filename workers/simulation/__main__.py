"""`python -m workers.simulation --config FILE`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.simulation.config import ConfigError, read_config
from workers.simulation.process import Simulation


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate until SIGTERM, SIGINT or the end of the parent process."""
    parser = argparse.ArgumentParser(prog="workers.simulation", description="Simulate a share of a fleet.")
    parser.add_argument("--config", type=Path, required=True, help="private file that says what to simulate")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = read_config(arguments.config)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - what a command says to its caller
        return 2
    simulation = Simulation(config)
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, lambda *_: simulation.stop())
    simulation.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
