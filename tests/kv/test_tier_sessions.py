"""Sessions: what is kept hot for their next turns, and what they are said to have used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.engines.kv_blocks import BlockAllocator
from workers.kv.tiers.heat import Heat
from workers.kv.tiers.sessions import SessionTable, Turn

TURN = Turn(100, 20, {"accelerator": 32, "host": 16}, preemptions=1, swaps=2)


def chain(name: str, blocks: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{n}".encode() for n in range(blocks))


def fill(pool: BlockAllocator, digests: tuple[bytes, ...]) -> None:
    """Let a sequence with this content come and go."""
    blocks = pool.allocate(len(digests))
    assert blocks is not None
    for block, digest in zip(blocks, digests, strict=True):
        pool.register(block, digest)
    pool.release(blocks)


def test_last_turn_of_a_live_session_outlives_newer_requests_of_nobody() -> None:
    heat = Heat()
    pool = BlockAllocator(10, heat=heat)
    sessions = SessionTable(heat, hot_blocks=10)
    fill(pool, chain("s", 4))
    sessions.end_turn("s", chain("s", 4), TURN, now=0.0)
    for number in range(20):
        fill(pool, chain(f"other{number}-", 3))
    assert len(pool.match(chain("s", 4))) == 4
    sessions.forget_old(now=10_000.0)
    for number in range(20, 24):
        fill(pool, chain(f"other{number}-", 3))
    assert pool.match(chain("s", 4)) == []


def test_what_only_an_earlier_turn_had_goes_first_from_its_end() -> None:
    heat = Heat()
    pool = BlockAllocator(8, heat=heat)
    sessions = SessionTable(heat, hot_blocks=100)
    shared, old, new = chain("p", 2), chain("old", 2), chain("new", 2)
    fill(pool, shared + old)
    sessions.end_turn("s", shared + old, TURN, now=0.0)
    held = pool.match(shared)
    pool.acquire(held)
    more = pool.allocate(2)
    assert more is not None
    for block, digest in zip(more, new, strict=True):
        pool.register(block, digest)
    pool.release([*held, *more])
    sessions.end_turn("s", shared + new, TURN, now=1.0)
    fill(pool, chain("x", 3))  # one more than is free
    assert len(pool.match(shared + old)) == 3
    assert len(pool.match(shared + new)) == 4


@given(
    turns=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.floats(0.0, 5.0)), max_size=40),
    most=st.integers(1, 4),
)
def test_hot_blocks_and_sessions_stay_within_bounds(turns: list[tuple[int, int, float]], most: int) -> None:
    heat = Heat()
    sessions = SessionTable(heat, hot_blocks=16, live_seconds=8.0, most=most)
    now = 0.0
    for number, blocks, pause in turns:
        now += pause
        sessions.begin_turn(f"s{number}", now=now)
        sessions.end_turn(f"s{number}", chain(f"s{number}-", blocks), TURN, now=now)
        sessions.forget_old(now=now)
        every = [f"s{n}-{b}".encode() for n in range(6) for b in range(10)]
        assert sum(map(heat.is_hot, every)) <= 12
        assert len(sessions) <= most
    sessions.forget_old(now=now + 9.0)
    assert len(sessions) == 0
    assert not any(heat.is_hot(f"s{n}-{b}".encode()) for n in range(6) for b in range(10))


def test_use_of_a_session_is_added_up_over_its_turns() -> None:
    sessions = SessionTable(Heat(), hot_blocks=10)
    for number in range(3):
        sessions.begin_turn("s", now=float(number))
        sessions.end_turn("s", chain("s", 2), TURN, now=float(number))
    sessions.begin_turn("s", now=5.0)
    (row,) = sessions.rows(now=6.0)
    assert (row.session_id, row.idle_seconds, row.kept_blocks) == ("s", 1.0, 2)
    assert (row.use.requests, row.use.open_requests) == (4, 1)
    assert row.use.cached_tokens == {"accelerator": 96, "host": 48, "disk": 0}
    assert (row.use.prompt_tokens, row.use.generated_tokens) == (300, 60)
    assert (row.use.preemptions, row.use.swaps) == (3, 6)


def test_a_session_with_an_open_request_is_not_forgotten() -> None:
    sessions = SessionTable(Heat(), hot_blocks=10)
    sessions.begin_turn("s", now=0.0)
    sessions.forget_old(now=10_000.0)
    assert [row.session_id for row in sessions.rows(now=0.0)] == ["s"]
