"""Prompts go where their beginning is, unless that is too busy to be worth it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.routing.domain.prefixes import (
    DIGEST_BYTES,
    NEWS_SECONDS,
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
    reported_requests: int | None = None
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
    memory.note(describe_text(SYSTEM + b"one").digests, "a", 0.0)
    name, cached = choose(SYSTEM + b"two", memory, Replica("a", in_flight=2), Replica("b"), Replica("c"))
    assert name == "a"
    assert cached > 1000


def test_holder_with_more_queued_than_is_saved_is_passed_over_and_the_beginning_spreads() -> None:
    memory = PrefixMemory()
    text = SYSTEM + b"one"
    memory.note(describe_text(text).digests, "a", 0.0)
    busy = Replica("a", pending_tokens=50_000)
    name, cached = choose(text, memory, busy, Replica("b"), Replica("c"))
    assert (name, cached) == ("b", 0.0)
    memory.note(describe_text(text).digests, name, 0.0)
    assert {who for who, _ in memory.holders(describe_text(text).digests[0])} == {"a", "b"}


def test_deeper_match_wins_over_a_shorter_one() -> None:
    memory = PrefixMemory()
    memory.note(describe_text(SYSTEM).digests, "short", 0.0)
    memory.note(describe_text(SYSTEM + b"conversation " * 500).digests, "long", 0.0)
    prompt = SYSTEM + b"conversation " * 500 + b"and on"
    assert choose(prompt, memory, Replica("short"), Replica("long"), Replica("x"))[0] == "long"


def test_replica_with_a_low_weight_is_dearer_and_an_ejected_one_dearest() -> None:
    well, poor, ejected = Replica("a"), Replica("b", weight=0.5), Replica("c", weight=0.0)
    costs = [cost_tokens(replica, 1000) for replica in (well, poor, ejected)]
    assert costs[1] == 2 * costs[0]
    assert costs[2] > 100 * costs[0]
    assert choose(b"short", PrefixMemory(), ejected, poor)[0] == "b"


def test_requests_of_other_gateways_count_as_the_engine_reports_them() -> None:
    busy = Replica("a", reported_requests=40)
    assert cost_tokens(busy, 0.0) == cost_tokens(Replica("b", in_flight=40), 0.0)
    assert cost_tokens(Replica("c", in_flight=3, reported_requests=1), 0.0) == cost_tokens(
        Replica("d", in_flight=3), 0.0
    )


def test_holder_that_is_gone_or_unusable_is_not_chosen() -> None:
    memory = PrefixMemory()
    memory.note(describe_text(SYSTEM).digests, "gone", 0.0)
    assert choose(SYSTEM, memory, Replica("b"))[0] == "b"
    assert choose_by_prefix(describe_text(SYSTEM), memory, lambda _who, _cached: None, ()) is None


def test_what_a_replica_was_sent_before_it_evicted_is_not_counted_on() -> None:
    memory = PrefixMemory()
    whole = describe_text(SYSTEM + b"conversation " * 500)
    memory.note(whole.digests, "a", 100.0)
    memory.note(describe_text(SYSTEM).digests, "a", 200.0)  # the beginning alone was used again
    known = {"a": Replica("a"), "b": Replica("b")}

    def choose_after(evicted: dict[str, float]) -> tuple[str, float]:
        choice = choose_by_prefix(
            whole, memory, lambda who, _: known[who], (known["b"],), evicted_until=lambda who: evicted[who]
        )
        assert choice is not None
        return choice.server.name, choice.cached_tokens

    assert choose_after({"a": 50.0}) == ("a", whole.sizes_tokens[-1])
    assert choose_after({"a": 150.0}) == ("a", describe_text(SYSTEM).sizes_tokens[-1])
    assert choose_after({"a": 250.0})[1] == 0.0


def test_news_are_beginnings_not_known_of_the_replica_or_not_said_for_a_while() -> None:
    memory = PrefixMemory()
    first, longer = describe_text(SYSTEM), describe_text(SYSTEM + b"more " * 500)
    assert memory.note(first.digests, "a", 0.0) == list(first.digests)
    assert memory.note(first.digests, "a", 1.0) == []
    assert memory.note(longer.digests, "a", 2.0) == list(longer.digests[len(first.digests) :])
    assert memory.note(first.digests, "b", 3.0) == list(first.digests)
    assert memory.note(first.digests, "a", 3.0 + NEWS_SECONDS) == list(first.digests)


def test_late_news_do_not_take_back_what_was_seen_since() -> None:
    memory = PrefixMemory()
    digests = describe_text(SYSTEM).digests
    memory.note(digests, "a", 100.0)
    memory.note(digests, "a", 90.0)
    assert list(memory.holders(digests[0])) == [("a", 100.0)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12)), max_size=200))
def test_memory_is_bounded_whatever_comes(requests: list[tuple[int, int]]) -> None:
    memory = PrefixMemory(most_digests=20, most_holders=3)
    for text, replica in requests:
        beginning = Beginning((bytes([text]) * 16, bytes([text, replica]) * 8), (1.0, 2.0), 3.0)
        memory.note(beginning.digests, f"r{replica}", 0.0)
        assert next(memory.holders(beginning.digests[1]))[0] == f"r{replica}"
        assert len(memory) <= 20
        assert all(len(list(memory.holders(digest))) <= 3 for digest in beginning.digests)
