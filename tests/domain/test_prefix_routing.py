"""Prompts go where their beginning is, unless that is too busy to be worth it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.routing.domain.prefixes import (
    DIGEST_BYTES,
    Beginning,
    PrefixMemory,
    choose_by_prefix,
    cost_tokens,
    describe_text,
)


@dataclass
class Replica:
    name: str
    pending_tokens: float = 0.0
    in_flight: int = 0
    weight: float = 1.0


SYSTEM = b"You are a careful assistant. " * 200


def choose(text: bytes, memory: PrefixMemory, *replicas: Replica, others: int = 2) -> tuple[str, float]:
    known = {replica.name: replica for replica in replicas}
    choice = choose_by_prefix(describe_text(text), memory, lambda who, _: known.get(who), replicas[-others:])
    assert choice is not None
    return choice.server.name, choice.cached_tokens


def test_equal_beginnings_share_digests_up_to_where_they_part() -> None:
    one, other = describe_text(SYSTEM + b"Tell me a story."), describe_text(SYSTEM + b"What is 2 + 2?")
    shared = sum(a == b for a, b in zip(one.digests, other.digests, strict=False))
    assert shared == len(one.digests), "they part within the last piece, which has no digest yet"
    changed = describe_text(b"X" + SYSTEM[1:])
    assert not set(changed.digests) & set(one.digests)


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_digests_never_depend_on_what_follows(text: bytes, more: bytes) -> None:
    short, long = describe_text(text), describe_text(text + more)
    assert long.digests[: len(short.digests)] == short.digests
    assert long.sizes_tokens[: len(short.sizes_tokens)] == short.sizes_tokens
    assert all(len(digest) == DIGEST_BYTES for digest in long.digests)
    assert list(long.sizes_tokens) == sorted(set(long.sizes_tokens))
    assert all(size <= long.total_tokens for size in long.sizes_tokens)


def test_long_prompt_costs_few_digests() -> None:
    assert len(describe_text(b"x" * 1_000_000).digests) < 60
    assert describe_text(b"x" * 100).digests == ()


def test_next_prompt_goes_where_its_beginning_is() -> None:
    memory = PrefixMemory()
    memory.note(describe_text(SYSTEM + b"one"), "a")
    name, cached = choose(SYSTEM + b"two", memory, Replica("a", in_flight=2), Replica("b"), Replica("c"))
    assert name == "a"
    assert cached > 1000


def test_holder_with_more_queued_than_is_saved_is_passed_over_and_the_beginning_spreads() -> None:
    memory = PrefixMemory()
    text = SYSTEM + b"one"
    memory.note(describe_text(text), "a")
    busy = Replica("a", pending_tokens=50_000)
    name, cached = choose(text, memory, busy, Replica("b"), Replica("c"))
    assert (name, cached) == ("b", 0.0)
    memory.note(describe_text(text), name)
    assert set(memory.holders(describe_text(text).digests[0])) == {"a", "b"}


def test_deeper_match_wins_over_a_shorter_one() -> None:
    memory = PrefixMemory()
    memory.note(describe_text(SYSTEM), "short")
    memory.note(describe_text(SYSTEM + b"conversation " * 500), "long")
    prompt = SYSTEM + b"conversation " * 500 + b"and on"
    assert choose(prompt, memory, Replica("short"), Replica("long"), Replica("x"))[0] == "long"


def test_replica_with_a_low_weight_is_dearer_and_an_ejected_one_dearest() -> None:
    well, poor, ejected = Replica("a"), Replica("b", weight=0.5), Replica("c", weight=0.0)
    costs = [cost_tokens(replica, 1000) for replica in (well, poor, ejected)]
    assert costs[1] == 2 * costs[0]
    assert costs[2] > 100 * costs[0]
    assert choose(b"short", PrefixMemory(), ejected, poor)[0] == "b"


def test_holder_that_is_gone_or_unusable_is_not_chosen() -> None:
    memory = PrefixMemory()
    memory.note(describe_text(SYSTEM), "gone")
    assert choose(SYSTEM, memory, Replica("b"))[0] == "b"
    assert choose_by_prefix(describe_text(SYSTEM), memory, lambda _who, _cached: None, ()) is None


def test_forgotten_beginnings_are_gone_for_that_replica_alone() -> None:
    memory = PrefixMemory()
    beginning = describe_text(SYSTEM)
    memory.note(beginning, "a")
    memory.note(beginning, "b")
    memory.forget(beginning.digests, "b")
    assert memory.holders(beginning.digests[0]) == ("a",)
    memory.forget(beginning.digests, "a")
    assert len(memory) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12)), max_size=200))
def test_memory_is_bounded_whatever_comes(requests: list[tuple[int, int]]) -> None:
    memory = PrefixMemory(most_digests=20, most_holders=3)
    for text, replica in requests:
        beginning = Beginning((bytes([text]) * 16, bytes([text, replica]) * 8), (1.0, 2.0), 3.0)
        memory.note(beginning, f"r{replica}")
        assert memory.holders(beginning.digests[1])[0] == f"r{replica}"
        assert len(memory) <= 20
        assert all(len(memory.holders(digest)) <= 3 for digest in beginning.digests)
