"""An agent that is killed in the middle of a download leaves nothing to be cleaned up by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.weight_store_process import SHARDS
from tests.fakes.weights import PIECE, BadSource, made_weights, running_store
from workers.protocol.weights import WeightsState


@pytest.mark.parametrize("pieces", [3, 12])
def test_a_killed_download_goes_on_from_its_verified_pieces(tmp_path: Path, pieces: int) -> None:
    weights = made_weights(shards=SHARDS)
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.weight_store_process", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    have = 0
    for line in child.stdout:
        have = int(line)
        if have >= pieces * PIECE:
            break
    child.kill()
    child.wait(20)
    child.stdout.close()
    assert have < weights.total_bytes, "killed in the middle"
    assert (tmp_path / "store" / "lock").exists(), "the file stays; the lock does not"
    source = BadSource(weights.contents)
    with running_store(tmp_path) as store:
        store.know(weights)
        store.want(weights.wanted(store.give("file:///again", source)))
        held = store.wait_state(weights, WeightsState.READY)
        assert store.is_right(weights)
    assert sum(s.bytes for s in held.sources) <= weights.total_bytes - have
