"""The failover benchmark runs at a small size: deaths are seen, requests go on, nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.outage, pytest.mark.timeout(500)]

CODE = Path(__file__).resolve().parents[2]
SMALL = (
    *("--nodes", "8", "--replicas", "2", "--deaths", "2", "--pace-seconds", "6"),
    *("--quiet-seconds", "10", "--virtual-hours", "0.05", "--kills", "1"),
)


def test_small_failover_run_sees_every_death_and_fails_no_request() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.failover", "--json", *SMALL],
        cwd=CODE,
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)
    for part, deaths in (("simulated", 2), ("real", 1)):
        seen = figures[part]
        assert (seen["deaths"], seen["deaths_not_detected"], seen["deaths_without_reroute"]) == (deaths, 0, 0)
        assert seen["lost_replicas"] == seen["standbys_seen"] > 0
        assert seen["requests"] > 20
    assert figures["failed_new_requests"] == 0, figures
    assert figures["false_deaths"] == 0
    assert figures["quiet"]["mass_silence_incidents"] >= 1
    assert figures["orphans_after_stop"] == 0
    # Nothing is told about how long it took: that is for an idle machine.
    assert figures["detect_p50_seconds"] > 0
