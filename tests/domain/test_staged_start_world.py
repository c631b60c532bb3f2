"""In one model of links and disks, starts in turns spare the source and bring capacity back sooner."""

from __future__ import annotations

import json

import pytest

from bench.staged_start import NO_LIMITS, Outcome, Site, Source, World, compare, main
from bench.swarm.fluid import Fleet
from exaserve_ops.serving.domain.starts import StartLimits

SMALL = Site(Fleet(nodes=32, rack_nodes=8))


@pytest.fixture(scope="module")
def ways() -> dict[tuple[str, bool], Outcome]:
    outcomes = compare(SMALL)
    return {(one.source, one.staged): one for one in outcomes}


def test_node_limit_holds_throughout_and_all_get_ready(ways: dict[tuple[str, bool], Outcome]) -> None:
    for (_, staged), one in ways.items():
        assert one.most_on_a_node == (StartLimits().per_node if staged else SMALL.replicas_per_node)
        assert one.starts_ended_by_time == 0


def test_nodes_that_pass_weights_on_cost_the_origin_one_copy(ways: dict[tuple[str, bool], Outcome]) -> None:
    ours = ways[Source.SWARM.value, True]
    stampede = ways[Source.ORIGIN.value, False]
    assert ours.origin_copies == pytest.approx(1.0, abs=0.01)
    assert stampede.origin_copies == pytest.approx(32.0, abs=0.1)
    assert stampede.all_ready_seconds > 10 * ours.all_ready_seconds


def test_turns_bring_the_first_and_the_middle_sooner_and_cost_little_at_the_end(
    ways: dict[tuple[str, bool], Outcome],
) -> None:
    for source in (Source.SWARM, Source.ORIGIN):
        turns, stampede = ways[source.value, True], ways[source.value, False]
        assert turns.first_ready_seconds < stampede.first_ready_seconds
        assert turns.half_ready_seconds < stampede.half_ready_seconds
        assert turns.all_ready_seconds < 1.25 * stampede.all_ready_seconds
    assert ways[Source.ORIGIN.value, True].most_from_source == StartLimits().from_origins


def test_file_server_that_all_read_at_once_ends_every_start_by_its_time_limit_and_turns_end_none() -> None:
    slow = Site(Fleet(nodes=32, rack_nodes=8), file_server=1.6e9)
    stampede = World(slow, Source.IN_PLACE, NO_LIMITS).run(8.0)
    turns = World(slow, Source.IN_PLACE, StartLimits(in_place=8)).run(8.0)
    assert stampede.starts_ended_by_time >= 32 * slow.replicas_per_node
    assert turns.starts_ended_by_time == 0
    assert turns.most_from_source == 8
    assert turns.half_ready_seconds < stampede.first_ready_seconds


def test_entry_point_says_that_all_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["simulated"]
    assert len(told["outcomes"]) == 6
    main(["--nodes", "4"])
    assert capsys.readouterr().out.count("simulated:") == 6
