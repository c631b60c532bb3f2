"""A store that takes a model in, in a process to be killed half-way: `python -m … ROOT ADDRESS`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.fakes.weights import Store
from workers.protocol.imports import WeightsImport
from workers.weights.imports import one_file, records


def main(root: Path, location: str) -> None:
    """Take it in, saying again and again how many bytes are here, until it is killed."""
    one_file.SYNC_SECONDS = records.WRITE_SECONDS = 0.0
    store = Store(root)
    order = WeightsImport(import_id="i-1", kind="hub", location=location)
    store.take_in(order)
    store.keeper.start()
    while True:
        seen = store.seen(order)
        sys.stdout.write(f"{seen.have_bytes if seen else 0}\n")
        sys.stdout.flush()
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
