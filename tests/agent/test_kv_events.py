"""KV events of real engines: read, put together by content, and heard over ZMQ with their gaps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.kv_publisher import CLEARED, KvPublisher, removed, stored
from workers.agent.kv_listener import KvListener, KvTold
from workers.engines.base import EngineSample
from workers.engines.kv_events import (
    Batch,
    Cleared,
    DamagedEventsError,
    Removed,
    Stored,
    decode_batch,
    extend_chain,
)
from workers.engines.kv_sight import KvSight

KEY = ("r-1", 1)


def wait_until(condition: Callable[[], object]) -> None:
    """Bounded by what a busy machine may take."""
    give_up_at = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < give_up_at, "it did not come about"
        time.sleep(0.01)


A, B, C = [1] * 4, [2] * 4, [3] * 4


def batch(*events: Any) -> Batch:
    return decode_batch(msgspec.msgpack.encode([1.0, list(events), 0]))


def sight_of(*events: Any) -> KvSight:
    """Each event a second after the one before."""
    sight = KvSight()
    for at, event in enumerate(events):
        sight.take(batch(event), rank=0, now=float(at))
    return sight


# What vLLM 0.32 really sent for the first block of a prompt.
REAL = bytes.fromhex(
    "93cb41dac361a42ce908918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfbdedef175db1"
    "e8f8b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0020cd01764fcd0150cd031b40cd05604ccd"
    "0200cd01744fcd0150cd031b40cd05604ccd0200cd01744fcd0150cd031b40cd05604ccd0200cd01744fcd0150cd031b40cd"
    "05604ccd0200aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa"
    "65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f6174"
    "74656e74696f6e00"
)


def test_both_shapes_of_a_batch_mean_the_same() -> None:
    array = msgspec.msgpack.encode(
        [
            1.5,
            [
                ["BlockStored", [-7, b"\x01"], 9, [1, 2, 3, 4], 2, None, "GPU"],
                ["BlockRemoved", [-7]],
                ["AllBlocksCleared"],
            ],
        ]
    )
    maps = msgspec.msgpack.encode(
        [
            1.5,
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [-7, b"\x01"],
                    "parent_block_hash": 9,
                    "token_ids": [1, 2, 3, 4],
                    "block_size": 2,
                    "medium": "GPU",
                },
                {"type": "BlockRemoved", "block_hashes": [-7]},
                {"type": "AllBlocksCleared"},
            ],
            0,
        ]
    )
    assert decode_batch(array) == decode_batch(maps)
    first, second, third = decode_batch(array).events
    assert first == Stored((-7, b"\x01"), 9, ((1, 2), (3, 4)), (b"", b""), "GPU")
    assert second == Removed((-7,))
    assert third == Cleared()


def test_batch_of_a_real_engine_is_read() -> None:
    (event,) = decode_batch(REAL).events
    assert isinstance(event, Stored)
    assert len(event.tokens[0]) == 32
    assert event.tokens[0][:4] == (374, 79, 336, 795)
    assert event.names == (13685857726284032248,)
    assert (event.parent, event.medium, event.group, event.whole_prefix) == (None, "GPU", 0, True)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0, [[]]]),
        msgspec.msgpack.encode([1.0, [stored([1, 2], [1, 2, 3])]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}]]),
        msgspec.msgpack.encode([1.0, [stored([1], [1 << 40])]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": ["text"]}]]),
        msgspec.msgpack.encode(["soon", []]),
        msgspec.msgpack.encode([math.nan, []]),
        msgspec.msgpack.encode([math.inf, []]),
        msgspec.msgpack.encode([1.0, [stored([1], [1], group_idx=math.inf)]]),
        msgspec.msgpack.encode([1.0, [stored([1], [1]) | {"block_size": math.inf}]]),
        b"\x91" * 100_000 + b"\x90",
        b"\x92\xcb" + b"\0" * 8 + b"\x91" * 100_000 + b"\x90",
    ],
)
def test_damaged_batch_is_refused_by_type(raw: bytes) -> None:
    with pytest.raises(DamagedEventsError):
        decode_batch(raw)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_batch_or_damaged(raw: bytes) -> None:
    with suppress(DamagedEventsError):
        decode_batch(raw)


def test_kinds_that_nobody_knows_are_counted_and_the_rest_is_read() -> None:
    found = batch(["BlockPraised", 1], removed([5]))
    assert (found.unknown, len(found.events)) == (1, 1)


def test_equal_content_has_one_digest_whatever_the_engine_calls_it() -> None:
    one = sight_of(stored([11, 12], A + B))
    other = sight_of(stored([b"x"], A), stored([b"y"], B, parent=b"x"))
    first = extend_chain(b"\0" * 16, A)
    for sight in (one, other):
        assert first in sight
        assert extend_chain(first, B) in sight
        assert sight.cached_tokens == 8
    assert extend_chain(b"\0" * 16, B) not in one


PICTURE = "a" * 64


@pytest.mark.parametrize(
    "more",
    [
        {"lora_name": "sql"},
        {"lora_id": 3},
        {"extra_keys": [["tenant-salt"]]},
        {"lora_name": "x" * 100},
        {"extra_keys": [[PICTURE, "second"]]},
    ],
)
def test_adapters_pictures_and_salts_make_other_content_of_equal_tokens(more: dict[str, Any]) -> None:
    sight = sight_of(stored([1], A), stored([2], A, **more))
    assert len(sight) == 2


def test_content_apart_differs_wherever_its_names_part() -> None:
    long_names = [f"{PICTURE}{end}" for end in ("one", "two")]
    sight = sight_of(*(stored([at], A, extra_keys=[[name, 0]]) for at, name in enumerate(long_names)))
    assert len(sight) == 2
    again = sight_of(*(stored([at], A, extra_keys=[[long_names[0], 0]]) for at in range(2)))
    assert len(again) == 1


def test_what_was_evicted_last_says_until_when_the_cache_is_gone() -> None:
    sight = sight_of(stored([1], A), stored([2], B), stored([3], C), removed([1]))
    assert sight.evicted_idle_seconds(10.0) == 10.0  # used at 0
    sight.take(batch(removed([2])), rank=0, now=5.0)
    assert sight.evicted_idle_seconds(10.0) == 9.0
    assert len(sight) == 1
    assert sight_of(stored([1], A)).evicted_idle_seconds(10.0) is None


def test_a_beginning_was_used_when_something_was_stored_behind_it() -> None:
    sight = sight_of(stored([1], A), stored([2], B, parent=1), stored([3], C, parent=1))
    # Tails leave first; then the beginning, which was used at 2 as the last tail behind it.
    for name in (2, 3):
        sight.take(batch(removed([name])), rank=0, now=8.0)
    sight.take(batch(removed([1])), rank=0, now=8.0)
    assert sight.evicted_idle_seconds(10.0) == 8.0
    assert (len(sight), sight.cached_tokens) == (0, 0)


def test_content_is_gone_only_when_no_rank_and_no_medium_has_it() -> None:
    sight = KvSight()
    sight.take(batch(stored([1], A)), rank=0, now=0.0)
    sight.take(batch(stored([1], A, medium="CPU")), rank=0, now=1.0)
    sight.take(batch(stored([77], A)), rank=1, now=2.0)
    assert sight.cached_tokens == 4
    sight.take(batch(removed([1])), rank=0, now=3.0)
    sight.take(batch(removed([1], medium="CPU")), rank=0, now=4.0)
    assert sight.evicted_idle_seconds(9.0) is None
    sight.take(batch(removed([77])), rank=1, now=5.0)
    assert sight.evicted_idle_seconds(9.0) == 7.0


def test_clearing_leaves_nothing_of_what_was_cached_before() -> None:
    sight = sight_of(stored([1], A), CLEARED)
    assert len(sight) == 0
    assert sight.evicted_idle_seconds(3.0) == 2.0


def test_windows_that_slide_say_nothing_of_the_prefix() -> None:
    sight = sight_of(
        stored([1], A, group_idx=1, kv_cache_spec_kind="sliding_window"),
        stored([1], A, group_idx=0, kv_cache_spec_kind="full_attention"),
        {**removed([1]), "group_idx": 1},
    )
    assert len(sight) == 1
    assert sight.evicted_idle_seconds(9.0) is None


def test_what_is_kept_is_bounded_and_forgetting_is_no_eviction() -> None:
    sight = KvSight(most_blocks=10)
    for name in range(100):
        sight.take(batch(stored([name], [name] * 4)), rank=0, now=float(name))
    assert len(sight) == 10
    assert sight.cached_tokens == 40
    assert sight.evicted_idle_seconds(200.0) is None


BLOCKS = st.integers(0, 5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), BLOCKS, st.none() | BLOCKS, st.integers(0, 1)),
        st.tuples(st.just("remove"), BLOCKS, st.none(), st.integers(0, 1)),
        st.tuples(st.just("clear"), st.just(0), st.none(), st.integers(0, 1)),
    ),
    max_size=40,
)


@given(STEPS)
def test_counts_hold_whatever_comes_in_whatever_order(steps: list[tuple[str, int, int | None, int]]) -> None:
    sight = KvSight(most_blocks=6)
    horizon = -1.0
    for at, (what, name, parent, rank) in enumerate(steps):
        event = {"store": stored([name], [name] * 4, parent=parent), "remove": removed([name])}.get(
            what, CLEARED
        )
        sight.take(batch(event), rank=rank, now=float(at))
        assert sight.cached_tokens == 4 * len(sight)
        assert len(sight) <= 6
        idle = sight.evicted_idle_seconds(float(at))
        if idle is not None:
            assert horizon <= at - idle <= at  # it never goes back
            horizon = at - idle
    for rank in (0, 1):
        sight.take(batch(CLEARED), rank=rank, now=100.0)
    assert (len(sight), len(sight._held)) == (0, 0)


@contextmanager
def listening(*publishers: KvPublisher) -> Iterator[KvListener]:
    listener = KvListener()
    try:
        listener.watch({KEY: tuple(publisher.source for publisher in publishers)})
        for publisher in publishers:
            publisher.wait_for_listener()
        yield listener
    finally:
        listener.stop()


def told(listener: KvListener) -> KvTold:
    return listener.told(KEY) or KvTold()


def test_what_was_published_before_anybody_listened_is_asked_for() -> None:
    with KvPublisher() as publisher:
        publisher.hide(stored([1], A))
        publisher.hide(stored([2], B, parent=1))
        with listening(publisher) as listener:
            publisher.publish(stored([3], C, parent=2))
            wait_until(lambda: told(listener).cached_tokens == 12)
            assert (told(listener).lost, told(listener).damaged) == (0, 0)
    assert publisher.asked[0] == 0


def test_a_gap_is_filled_from_what_the_publisher_kept() -> None:
    with KvPublisher() as publisher, listening(publisher) as listener:
        publisher.publish(stored([1], A))
        wait_until(lambda: told(listener).cached_tokens == 4)
        publisher.hide(stored([2], B))
        publisher.hide(removed([1]))
        publisher.publish(stored([3], C))
        wait_until(lambda: told(listener).cached_tokens == 8)
        assert told(listener).lost == 0
        assert told(listener).evicted_until_seconds is not None


@pytest.mark.parametrize("answers", [True, False], ids=["kept too little", "does not answer"])
def test_a_gap_that_cannot_be_filled_drops_what_was_known(*, answers: bool) -> None:
    with KvPublisher(answers=answers) as publisher, listening(publisher) as listener:
        publisher.publish(stored([1], A))
        wait_until(lambda: told(listener).cached_tokens == 4)
        publisher.hide(CLEARED)
        publisher.forget()
        publisher.publish(stored([2], B))
        wait_until(lambda: told(listener).lost == 1)
        wait_until(lambda: told(listener).cached_tokens == 4)
        until = told(listener).evicted_until_seconds
        assert until is not None
        completed = listener.complete(KEY, EngineSample(), now=until + 2.0)
        assert completed.kv_evicted_idle_seconds == pytest.approx(2.0, abs=0.01)
        assert completed.kv_cached_tokens == 4
        assert completed.notes[0].startswith("KV events were lost 1 times")


def test_a_publisher_that_begins_anew_has_nothing_of_before() -> None:
    with KvPublisher() as publisher, listening(publisher) as listener:
        for name in range(5):
            publisher.publish(stored([name], [name] * 4))
        wait_until(lambda: told(listener).cached_tokens == 20)
        publisher.begin_anew()
        publisher.publish(stored([9], A))
        wait_until(lambda: told(listener).lost == 1)
        wait_until(lambda: told(listener).cached_tokens == 4)


def test_a_message_that_comes_twice_counts_once() -> None:
    with KvPublisher() as publisher, listening(publisher) as listener:
        publisher.publish(stored([1], A))
        number, data = publisher.hide(stored([2], B))
        for _ in range(3):
            publisher.send([b"kv-events", number.to_bytes(8, "big"), data])
        publisher.publish(stored([3], C))
        wait_until(lambda: told(listener).cached_tokens == 12)
        assert (told(listener).batches, told(listener).lost) == (3, 0)


def test_damaged_messages_are_counted_and_what_they_said_is_taken_for_lost() -> None:
    with KvPublisher() as publisher, listening(publisher) as listener:
        publisher.publish(stored([1], A))
        wait_until(lambda: told(listener).cached_tokens == 4)
        publisher.send([b"kv-events", b"short", b""])
        publisher.send([b"kv-events"])
        wait_until(lambda: told(listener).damaged == 2)
        assert told(listener).cached_tokens == 4
        publisher.publish(payload=b"\xc1")
        wait_until(lambda: told(listener).damaged == 3)
        assert told(listener).lost == 1
        publisher.publish(stored([2], B))
        wait_until(lambda: told(listener).cached_tokens == 4)
        assert told(listener).damaged == 3


def test_ranks_of_one_replica_are_heard_together() -> None:
    with KvPublisher(rank=0) as one, KvPublisher(rank=1) as two, listening(one, two) as listener:
        one.publish(stored([1], A))
        two.publish(stored([7], A))
        two.publish(stored([8], B))
        wait_until(lambda: told(listener).batches == 3)
        assert told(listener).cached_tokens == 8


def test_a_replica_that_is_not_watched_any_more_is_forgotten() -> None:
    with KvPublisher() as publisher, listening(publisher) as listener:
        publisher.publish(stored([1], A))
        wait_until(lambda: told(listener).cached_tokens == 4)
        listener.watch({})
        wait_until(lambda: listener.told(KEY) is None)
        before = EngineSample(kv_evicted_idle_seconds=3.0)
        assert listener.complete(KEY, before, now=time.monotonic()) is before


def test_without_sources_no_thread_is_started() -> None:
    listener = KvListener()
    listener.watch({KEY: ()})
    assert listener._thread is None
    listener.stop()
