"""A store in a process of its own, slow enough to be killed half-way: `python -m … ROOT`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.fakes.weights import BadSource, Store, made_weights
from workers.protocol.weights import WeightsState

SHARDS = 4


def main(root: Path) -> None:
    """Fetch, saying again and again how many bytes are verified, until it is killed."""
    weights = made_weights(shards=SHARDS)
    store = Store(root)
    store.know(weights)
    source = BadSource(weights.contents, pause_seconds=0.05)
    store.want(weights.wanted(store.give("file:///slow", source)))
    store.keeper.start()
    while store.state(weights) is not WeightsState.READY:
        held = store.held(weights)
        sys.stdout.write(f"{held.have_bytes if held else 0}\n")
        sys.stdout.flush()
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
