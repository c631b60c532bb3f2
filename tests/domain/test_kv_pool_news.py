"""What of a node's KV pools is news: one event for each real change, however often it is looked at."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.serving.domain.kv_pools import (
    Flag,
    LimitsWish,
    News,
    NodeMemory,
    NodeSight,
    WatchPolicy,
    follow_node,
    is_limits_wish,
    parse_limits_wish,
)

POLICY = WatchPolicy(short_seconds=10, enough_seconds=15, thrash_seconds=2, calm_seconds=30)


@dataclass
class Member:
    replica_id: str = "a"
    attempt: int = 1
    alive: bool = True
    leased_blocks: int = 32
    ceiling_blocks: int = 64
    waiting_requests: int = 0
    short_blocks: int = 0


@dataclass
class Pool:
    members: tuple[Member, ...] = (Member(),)
    pool_id: str = "p"
    block_bytes: int = 4096
    extent_blocks: int = 16
    free_blocks: int = 0
    damaged_blocks: int = 0
    reclaimed_extents: int = 0


WELL = Pool()
STARVED = Pool((Member(waiting_requests=3, short_blocks=12),))


class Watcher:
    """Looks once a second at what it is shown."""

    def __init__(self, memory: NodeMemory | None = None) -> None:
        self.memory = memory or NodeMemory()
        self.now = 0.0

    def look(self, sight: NodeSight | Pool, *, seconds: int = 1) -> list[News]:
        found: list[News] = []
        for _ in range(seconds):
            self.now += 1.0
            shown = sight if isinstance(sight, NodeSight) else NodeSight([sight])
            self.memory, news = follow_node(self.memory, shown, now=self.now, policy=POLICY)
            found += news
        return found


def events(news: list[News]) -> list[str]:
    return [one.event for one in news]


def test_lasting_shortage_is_told_once_and_its_end_once() -> None:
    watcher = Watcher()
    [news] = watcher.look(STARVED, seconds=60)
    assert (news.event, news.replica_id) == ("kv_out_of_blocks", "a")
    assert "3 requests wait for 12 more blocks" in news.reason
    assert "0 blocks of the node's pool are free" in news.reason
    assert events(watcher.look(WELL, seconds=60)) == ["kv_blocks_again"]


def test_shortage_at_a_replicas_own_ceiling_says_so() -> None:
    member = Member(waiting_requests=1, short_blocks=5, leased_blocks=64)
    [news] = Watcher().look(Pool((member,), free_blocks=500), seconds=20)
    assert "at its ceiling of 64 blocks" in news.reason


def test_shortage_that_comes_and_goes_is_no_news() -> None:
    watcher = Watcher()
    for _ in range(20):
        assert watcher.look(STARVED, seconds=9) == []
        assert watcher.look(WELL) == []


def test_flag_stays_up_through_short_moments_of_ease() -> None:
    watcher = Watcher()
    watcher.look(STARVED, seconds=20)
    for _ in range(20):
        assert watcher.look(WELL, seconds=10) == []
        assert watcher.look(STARVED) == []


def test_requests_that_wait_for_something_else_are_not_out_of_blocks() -> None:
    assert Watcher().look(Pool((Member(waiting_requests=5),)), seconds=60) == []


def test_thrash_is_told_with_the_engines_reason_and_its_end_after_a_calm_while() -> None:
    watcher = Watcher()
    busy, calm = NodeSight((), {"a": "40% came and left"}), NodeSight((), {"a": ""})
    assert watcher.look(busy, seconds=20) == [News("kv_thrash", "40% came and left", "a")]
    assert watcher.look(calm, seconds=29) == []
    assert events(watcher.look(calm, seconds=5)) == ["kv_thrash_over"]


def test_reclaim_names_who_died_and_how_much_came_back() -> None:
    watcher = Watcher()
    assert watcher.look(Pool((Member(), Member("b")), reclaimed_extents=7)) == [], "of a time before us"
    dead = Pool((Member(alive=False, leased_blocks=0), Member("b")), reclaimed_extents=9)
    [news] = watcher.look(dead, seconds=10)
    assert (news.event, news.replica_id, news.about) == ("kv_reclaimed", "", ("a",))
    assert news.reason.startswith("32 blocks (0.1 MiB) are wiped")


def test_reclaim_names_a_replica_whose_next_attempt_is_there_already() -> None:
    watcher = Watcher()
    watcher.look(WELL)
    [news] = watcher.look(Pool((Member(attempt=2),), reclaimed_extents=1))
    assert news.about == ("a",)


def test_reclaim_names_a_replica_that_was_seen_dead_before_it_was_swept() -> None:
    watcher = Watcher()
    watcher.look(WELL)
    assert watcher.look(Pool((Member(alive=False),))) == []
    [news] = watcher.look(Pool((Member(alive=False, leased_blocks=0),), reclaimed_extents=2))
    assert news.about == ("a",)


def test_pool_that_was_made_anew_reclaimed_nothing() -> None:
    watcher = Watcher()
    watcher.look(Pool(reclaimed_extents=7))
    assert watcher.look(Pool(reclaimed_extents=0)) == []


def test_damage_is_told_when_it_grows_and_when_it_is_gone() -> None:
    watcher = Watcher()
    assert watcher.look(WELL) == []
    assert events(watcher.look(Pool(damaged_blocks=16), seconds=9)) == ["kv_damaged"]
    assert events(watcher.look(Pool(damaged_blocks=32), seconds=9)) == ["kv_damaged"]
    assert events(watcher.look(WELL, seconds=9)) == ["kv_repaired"]


def test_flag_on_record_is_lowered_and_not_raised_again() -> None:
    watcher = Watcher(NodeMemory(out_of_blocks={"a": Flag(on=True)}))
    assert watcher.look(STARVED, seconds=30) == []
    assert events(watcher.look(WELL, seconds=30)) == ["kv_blocks_again"]


@given(st.lists(st.booleans(), max_size=200))
def test_events_of_a_flag_take_turns_and_are_apart(looks: list[bool]) -> None:
    watcher = Watcher()
    told: list[tuple[float, str]] = []
    for starved in looks:
        told += [(watcher.now, news.event) for news in watcher.look(STARVED if starved else WELL)]
    assert [event for _, event in told[::2]] == ["kv_out_of_blocks"] * len(told[::2])
    assert [event for _, event in told[1::2]] == ["kv_blocks_again"] * len(told[1::2])
    gaps = [after - before for (before, _), (after, _) in pairwise(told)]
    assert all(gap >= POLICY.short_seconds for gap in gaps)


def test_wish_for_limits_reads_as_it_was_written() -> None:
    wish = LimitsWish(str(uuid.uuid4()), str(uuid.uuid4()), 32, 64)
    assert parse_limits_wish(wish.text()) == wish
    assert is_limits_wish(wish.text())
    assert replace(wish, minimum_blocks=1).text() != wish.text()
    assert wish.text() != wish.text(), "each is a command of its own"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("end-process/1/2/3/4/5", "asks for no limits"),
        ("kv-limits/a/b/1/2/c", "badly formed"),
        ("kv-limits/1", "not enough values"),
    ],
)
def test_other_wishes_are_not_taken_for_limits(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_limits_wish(text)
