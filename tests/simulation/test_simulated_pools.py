"""A simulated node tells of its KV pool what its engine models say, and takes limits by the real rules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.simulation import Conversation, spec
from workers.protocol import v1
from workers.protocol.kv_pools import KvPool, KvPoolMember, unpack_map
from workers.simulation.engine import EngineModel, EngineShape, Request, Traffic
from workers.simulation.node import NodeShape

BUSY = NodeShape(traffic=Traffic(requests_per_second=2.0))


def busy(*replica_ids: str, seconds: float = 60) -> Conversation:
    talk = Conversation(shape=BUSY)
    talk.pass_time(2)
    talk.wish(*(spec(replica_id) for replica_id in replica_ids))
    talk.pass_time(seconds)
    return talk


def pool(talk: Conversation) -> KvPool:
    [found] = talk.beats()[-1][1].kv_pools
    return found


def member(talk: Conversation, replica_id: str = "a") -> KvPoolMember:
    return next(row for row in pool(talk).members if row.replica_id == replica_id)


def limit(talk: Conversation, minimum: int, ceiling: int, replica_id: str = "a") -> tuple[str, str]:
    """Ask for limits; what became of it."""
    talk.tell(
        v1.SetKvLimits(**talk.header(), replica_id=replica_id, minimum_blocks=minimum, ceiling_blocks=ceiling)
    )
    talk.pass_time(2)
    return talk.outcomes()[-1]


def test_pool_adds_up_and_its_map_shows_each_replica() -> None:
    talk = busy("a", "b", "c")
    seen = pool(talk)
    assert seen.capacity_blocks == 3 * EngineShape().kv_blocks
    assert seen.free_blocks == seen.capacity_blocks - sum(row.leased_blocks for row in seen.members)
    for row in seen.members:
        assert row.alive
        assert row.live_blocks + row.cached_blocks <= row.leased_blocks <= row.ceiling_blocks
        assert sum(row.cached_by_age_blocks) == row.cached_blocks > 0
        assert (row.borrowed_blocks, row.brought_blocks) == (0, 1024)
    cells = unpack_map(seen.map)
    assert len(cells) == seen.capacity_blocks // (seen.extent_blocks * seen.cell_extents)
    assert {cell.owner for cell in cells} == {0, 1, 2, 3}


def test_full_node_fits_the_map() -> None:
    cells = unpack_map(pool(busy(*"abcdefghijkl", seconds=12)).map)
    assert len(cells) == 384


def test_node_without_replicas_has_no_pool() -> None:
    talk = Conversation()
    talk.pass_time(2)
    assert talk.beats()[-1][1].kv_pools == ()


def test_killed_replica_keeps_its_place_and_its_blocks_are_reclaimed() -> None:
    talk = busy("a", "b")
    node = talk.fleet.nodes[0]
    engine = node.replicas["a"].engine
    assert engine is not None
    use = engine.kv_use(talk.now)
    held = use.live_blocks + sum(use.cached_by_age_blocks)
    node.replicas["a"].crash(talk.now)
    talk.pass_time(1)
    row = member(talk)
    assert (row.alive, row.leased_blocks, row.live_blocks) == (False, 0, 0)
    assert pool(talk).capacity_blocks == 2 * EngineShape().kv_blocks
    assert pool(talk).reclaimed_extents == -(-held // pool(talk).extent_blocks) > 0
    talk.pass_time(10)
    assert member(talk).alive


def test_lower_ceiling_holds_until_the_replica_is_started_anew() -> None:
    talk = busy("a", "b")
    assert limit(talk, 256, 500) == ("done", "")
    row = member(talk)
    assert (row.guaranteed_blocks, row.ceiling_blocks) == (256, 512), "whole extents"
    talk.pass_time(60)
    assert member(talk).leased_blocks <= 512
    telemetry = talk.replica("a").telemetry
    assert telemetry is not None
    assert telemetry.kv_total_blocks == 512
    talk.fleet.nodes[0].replicas["a"].crash(talk.now)
    talk.pass_time(10)
    assert member(talk).ceiling_blocks == 1024


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ((16, 512, "a"), "longest request takes 256 blocks, 16 would be guaranteed"),
        ((512, 256, "a"), "below the minimum"),
        ((2048, 2048, "a"), "3072 blocks would be guaranteed in all, and the pool has 2048"),
        ((256, 512, "z"), "in no pool"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused_with_the_reason(
    limits: tuple[int, int, str], why: str
) -> None:
    talk = busy("a", "b", seconds=10)
    outcome, reason = limit(talk, *limits)
    assert outcome == "refused"
    assert why in reason


def quiet(shape: EngineShape, rate: float = 0.0, seed: int = 1) -> EngineModel:
    traffic = Traffic(requests_per_second=rate)
    return EngineModel(shape, traffic, random.Random(seed), 0.0)  # noqa: S311 - a model


def test_misses_are_told_by_reason() -> None:
    model = quiet(EngineShape(kv_blocks=64))
    model.submit(Request(0.0, 160, 16, "a"))
    model.submit(Request(10.0, 320, 16, "a"))
    model.submit(Request(20.0, 800, 16, "b"))  # a's conversation has to leave
    model.submit(Request(30.0, 480, 16, "a"))
    telemetry = model.telemetry(40.0)
    missed = telemetry.prefix_miss_tokens_total
    assert telemetry.prefix_query_tokens_total is not None
    assert telemetry.prefix_hit_tokens_total is not None
    assert missed["evicted"] == 336
    assert missed["shorter_than_a_block"] == 4 * 16
    assert sum(missed.values()) == telemetry.prefix_query_tokens_total - telemetry.prefix_hit_tokens_total


def test_request_that_has_no_room_is_short_of_blocks_and_one_without_a_turn_is_not() -> None:
    model = quiet(EngineShape(kv_blocks=64))
    for index in range(3):
        model.submit(Request(0.0, 480, 400, f"s{index}"))
    use = model.kv_use(0.1)
    assert (use.waiting_requests, use.short_blocks) == (2, 55 + 55 - 64)
    crowd = quiet(EngineShape(batch_requests=1))
    for index in range(3):
        crowd.submit(Request(0.0, 160, 16, f"s{index}"))
    assert (crowd.kv_use(0.1).waiting_requests, crowd.kv_use(0.1).short_blocks) == (2, 0)


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(0.1, 20.0), blocks=st.integers(256, 2048), seed=st.integers(0, 99))
def test_what_lies_in_memory_never_exceeds_it(rate: float, blocks: int, seed: int) -> None:
    model = quiet(EngineShape(kv_blocks=blocks), rate, seed)
    for second in range(1, 120, 7):
        use = model.kv_use(float(second))
        assert 0 <= use.live_blocks + sum(use.cached_by_age_blocks) <= blocks
