"""An agent that is killed while it takes a model in goes on with what its disk has, and holds nothing up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fakes.hub import HubServer
from tests.fakes.weight_servers import serving
from tests.fakes.weights import PIECE, running_store, shard_of, weights_of
from workers.protocol.imports import WeightsImport


def test_an_import_goes_on_after_a_kill_and_fetches_only_the_rest(tmp_path: Path) -> None:
    contents = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": shard_of(40 * PIECE, 3)}
    model = weights_of(contents)
    with serving(HubServer(contents, bytes_per_second=20 * PIECE)) as hub:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.import_process", str(tmp_path), hub.location],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= 8 * PIECE:
                break
        child.kill()
        child.wait(20)
        child.stdout.close()
        hub.bytes_per_second = 0
        hub.asked.clear()
        order = WeightsImport(import_id="i-1", kind="hub", location=hub.location)
        with running_store(tmp_path) as store:
            store.take_in(order)
            assert store.findings(order).manifest_digest == model.digest
            assert store.is_right(model)
        ranges = [headers["range"] for path, headers in hub.asked if "safetensors" in path]
    first = int(ranges[0].removeprefix("bytes=").partition("-")[0])
    assert first >= 7 * PIECE


def test_what_was_found_before_a_kill_is_told_again_without_asking_anybody(tmp_path: Path) -> None:
    contents = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": shard_of(PIECE, 3)}
    with serving(HubServer(contents)) as hub:
        order = WeightsImport(import_id="i-1", kind="hub", location=hub.location)
        with running_store(tmp_path) as store:
            store.take_in(order)
            before = store.findings(order)
        hub.asked.clear()
        with running_store(tmp_path) as store:
            store.take_in(order)
            assert store.findings(order) == before
        assert not hub.asked
