"""The benchmark of kills runs at a small size: with continuation no stream of a dead replica is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.outage, pytest.mark.timeout(500)]

CODE = Path(__file__).resolve().parents[2]


def test_small_run_of_kills_loses_nothing_when_streams_are_continued() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.kills",
            "--json",
            "--kills",
            "1",
            "--only",
            "replica",
            "--only",
            "node",
        ],
        cwd=CODE,
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)
    assert figures["orphans_after_stop"] == 0
    for kind in ("replica", "node"):
        assert figures["off"][kind]["failed_streams"] > 0, "the kill hit streams"
        seen = figures["on"][kind]
        assert (seen["failed_streams"], seen["failed_new"]) == (0, 0), seen
        assert seen["moved_streams"] > 0
