"""The benchmark of swarms: its network goes away with it, its figures add up, and faults end well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.swarm import fluid, lan

ROOT = Path(__file__).parents[2]
needs_network = pytest.mark.skipif(bool(lan.why_not()), reason=lan.why_not() or "a network can be made")


def namespaces() -> str:
    command = ["ip", "netns", "list"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@needs_network
@pytest.mark.namespaces
@pytest.mark.timeout(400)
def test_everything_arrives_over_slow_links_and_faults_leave_no_bad_byte(tmp_path: Path) -> None:
    before = namespaces()
    sizes = ["--nodes", "2", "3", "--megabits", "40", "--megabytes", "8", "--piece-kib", "64"]
    command = [sys.executable, "-m", "bench.swarm", "--json", "--ways", "ours,central", *sizes]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    told = json.loads(done.stdout)
    assert namespaces() == before
    assert told["worst_origin_copies"] < 1.5
    assert told["central_worst_origin_copies"] > 2.9
    assert set(told["runs"]["ours"]) == {"2", "3"}
    assert told["faults_finished"]
    assert told["faults_bad_bytes"] == 0
    assert "No space left" in told["faults"]["full_disk"]["said"]


def test_a_simulated_fleet_takes_one_copy_of_the_origin_and_beats_a_tree() -> None:
    fleet = fluid.Fleet(nodes=24, rack_nodes=8, total_bytes=2 * 10**9)
    bound = fleet.total_bytes / fleet.node_bytes_per_second
    seconds, copies = fluid.planned(fleet)
    assert seconds < 1.15 * bound
    assert copies == pytest.approx(1.0, abs=0.01)
    assert fluid.tree(fleet) > 1.8 * bound
    assert fluid.central(fleet) == pytest.approx(24 * bound, rel=0.02)


def test_a_simulated_fleet_goes_on_without_its_dead() -> None:
    fleet = fluid.Fleet(nodes=16, rack_nodes=4, total_bytes=20 * 10**9)
    bound = fleet.total_bytes / fleet.node_bytes_per_second
    seconds, copies = fluid.planned(fleet, {bound * 0.2: "n001", bound * 0.5: "n006"})
    assert seconds < 1.5 * bound + 2 * fluid.DETECTION_SECONDS
    assert copies < 1.5
