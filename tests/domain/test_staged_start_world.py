"""In one model of links and disks, starts in turns spare the source and bring capacity back sooner."""

from __future__ import annotations

import json

import pytest

from bench.staged_start import NO_LIMITS, Outcome, Site, Source, World, main
from exaserve_ops.serving.domain.starts import StartLimits

SITE = Site()
"""256 nodes x 12."""
COARSE_SECONDS = {Source.SWARM: 1.0, Source.ORIGIN: 64.0, Source.IN_PLACE: 16.0}


@pytest.fixture(scope="module")
def ways() -> dict[tuple[Source, bool], Outcome]:
    """By source, and whether in turns."""
    return {
        (source, limits != NO_LIMITS): World(SITE, source, limits).run(step)
        for source, step in COARSE_SECONDS.items()
        for limits in (StartLimits(), NO_LIMITS)
    }


def test_node_limit_holds_throughout(ways: dict[tuple[Source, bool], Outcome]) -> None:
    for (_, staged), one in ways.items():
        assert one.most_on_a_node == (StartLimits().per_node if staged else SITE.replicas_per_node)
        assert not staged or one.most_at_once <= StartLimits().per_fleet


def test_nodes_that_pass_weights_on_cost_the_origin_one_copy(
    ways: dict[tuple[Source, bool], Outcome],
) -> None:
    ours, stampede = ways[Source.SWARM, True], ways[Source.ORIGIN, False]
    assert ours.origin_copies == pytest.approx(1.0, abs=0.01)
    assert stampede.origin_copies == pytest.approx(256.0, abs=0.1)
    assert stampede.all_ready_seconds > 100 * ours.all_ready_seconds


def test_turns_bring_the_first_and_the_middle_sooner_and_cost_little_at_the_end(
    ways: dict[tuple[Source, bool], Outcome],
) -> None:
    for source in Source:
        turns, stampede = ways[source, True], ways[source, False]
        assert turns.first_ready_seconds < stampede.first_ready_seconds
        assert turns.half_ready_seconds < stampede.half_ready_seconds
        assert turns.all_ready_seconds < 1.25 * stampede.all_ready_seconds
    assert ways[Source.ORIGIN, True].most_from_source == StartLimits().from_origins
    assert ways[Source.IN_PLACE, True].most_from_source == StartLimits().in_place


def test_file_server_that_all_read_at_once_ends_every_start_by_its_time_limit_and_turns_end_none(
    ways: dict[tuple[Source, bool], Outcome],
) -> None:
    assert ways[Source.IN_PLACE, False].starts_ended_by_time == 2 * 256 * 12
    assert ways[Source.IN_PLACE, True].starts_ended_by_time == 0


def test_entry_point_says_that_all_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["simulated"]
    assert len(told["outcomes"]) == 6
    main(["--nodes", "4"])
    assert capsys.readouterr().out.count("simulated:") == 6
