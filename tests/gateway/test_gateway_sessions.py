"""Sessions stay where their context is, on every gateway, with and without Redis."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from exaserve_ops.adapters.resp_link import LinkError, RespLink, read_reply
from exaserve_ops.adapters.session_table import (
    ABSENT,
    SessionEntry,
    SessionTable,
    SessionTableUnavailableError,
    owner_digest,
    session_place,
)
from exaserve_ops.adapters.turn_log import Turn, TurnLogReader
from exaserve_ops.routing.domain.records import TurnRecord
from tests.fakes.upstream import CHAT, DONE, USAGE, event, never, replies, streams, token
from tests.fakes.valkey import running_valkey
from tests.gateway.harness import Gateway, World, eventually

pytestmark = pytest.mark.asyncio


async def turn(gateway: Gateway, session: str) -> tuple[str, str]:
    """One request of a session. Returns the replica and why."""
    reply = await gateway.ask(headers={"x-session-id": session})
    assert reply.status == 200
    return reply.headers["x-exaops-replica"], reply.headers["x-exaops-route"]


async def add_replicas(world: World, count: int) -> None:
    for number in range(count):
        await world.engine(replies(CHAT), node_id=f"n{number // 2}")


async def test_turns_over_two_gateways_all_reach_one_replica(world: World) -> None:
    await add_replicas(world, 4)
    gateways = [await world.gateway() for _ in range(2)]
    homes: dict[str, set[str]] = collections.defaultdict(set)
    whys: collections.Counter[str] = collections.Counter()
    for number in range(10):
        for session in range(100):
            replica, why = await turn(gateways[(number + session) % 2], f"s{session}")
            homes[f"s{session}"].add(replica)
            whys[why] += 1
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert len(set.union(*homes.values())) == 4  # and they are spread
    assert whys == {"new": 100, "sticky": 900}
    assert all(gateway.shared.counters.sticky_ratio == 1.0 for gateway in gateways)


async def test_gateways_agree_while_redis_is_away(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as server:
        own = World(server.client(), server.url)
        own.allow("sk-test-key")
        own.writer.write_replicas({})
        try:
            await add_replicas(own, 4)
            gateways = [await own.gateway() for _ in range(2)]
            for gateway in gateways:
                await eventually(lambda gateway=gateway: len(gateway.shared.fleet.slots()) == 4)  # type: ignore[misc] # mypy cannot type defaults
            server.kill()
            for session in range(10):
                seen = {await turn(gateway, f"s{session}") for gateway in gateways}
                assert len(seen) == 1
                assert seen.pop()[1] == "hash"
            page = gateways[0].shared.render_metrics().decode()
            await eventually(lambda: "route_table_stale 1" in gateways[0].shared.render_metrics().decode())
            assert "session_table_failures_total" in page
            server.start()
            own.allow("sk-test-key")
            own.writer.write_replicas(own.records)
            await asyncio.sleep(1.1)  # the table is left alone for a second after a failure
            assert (await turn(gateways[0], "fresh"))[1] == "new"
        finally:
            await own.close()


async def test_store_that_lost_everything_does_not_empty_the_gateways_table(world: World) -> None:
    await add_replicas(world, 1)
    gateway = await world.gateway(poll_seconds=0.05)
    world.redis.flushall()
    await asyncio.sleep(0.3)
    assert (await gateway.ask()).status == 200
    world.writer.write_models(frozenset({"m"}))  # a first part is back, keys and replicas are not
    await asyncio.sleep(0.3)
    assert (await gateway.ask()).status == 200


async def test_session_of_a_draining_replica_moves_once_for_all_gateways(world: World) -> None:
    await add_replicas(world, 3)
    gateways = [await world.gateway() for _ in range(2)]
    home, _ = await turn(gateways[0], "s")
    world.put(home, world.records[home].port, node_id=world.records[home].node_id, accepts_new=False)
    for gateway in gateways:
        await eventually(
            lambda gateway=gateway: not gateway.shared.fleet.find(home).record.accepts_new  # type: ignore[misc] # mypy cannot type defaults
        )
    new_home, why = await turn(gateways[1], "s")
    assert (new_home != home, why) == (True, "repinned")
    assert await turn(gateways[0], "s") == (new_home, "sticky")


async def test_session_moves_with_the_retry_when_its_replica_dies(world: World) -> None:
    await add_replicas(world, 4)
    gateway = await world.gateway()
    home, _ = await turn(gateway, "s")
    await world.engines[int(home[1:])].stop()
    new_home, why = await turn(gateway, "s")
    assert (new_home != home, why) == (True, "repinned")
    assert await turn(gateway, "s") == (new_home, "sticky")
    moved_node = world.records[new_home].node_id
    assert moved_node != world.records[home].node_id  # a dead node costs one attempt


async def test_turn_is_taken_back_from_a_replica_that_its_session_has_left(world: World) -> None:
    await add_replicas(world, 2)
    gateway = await world.gateway()
    home, _ = await turn(gateway, "s")
    former = world.engines[int(home[1:])]
    former.answer = never
    (other,) = world.records.keys() - {home}
    async with session_table(world.url) as table:
        await table.repinned("m", "s", other, 1)  # as a controller does, which tells no gateway
        assert await turn(gateway, "s") == (other, "sticky")
        assert (await table.found("m", "s")).turns == 2
    assert gateway.shared.counters.turns_taken_back == 1
    await eventually(lambda: all(request.gone.is_set() for request in former.requests[1:]))
    assert gateway.shared.counters.sticky_ratio == 1.0
    assert gateway.shared.fleet.find(home).in_flight == 0  # type: ignore[union-attr] # it is in the table


async def test_turn_that_was_answered_before_its_move_was_known_is_followed_by_one_that_moved(
    world: World,
) -> None:
    await add_replicas(world, 2)
    gateway = await world.gateway()
    home, _ = await turn(gateway, "s")
    (other,) = world.records.keys() - {home}
    async with session_table(world.url) as table:
        await table.repinned("m", "s", other, 1)
        served_by, _ = await turn(gateway, "s")  # by either: the former owner may have been fast
        assert served_by in {home, other}
        async with asyncio.timeout(5):
            while (await table.found("m", "s")).turns < 2:  # noqa: ASYNC110 - in Redis
                await asyncio.sleep(0.01)
        assert await turn(gateway, "s") == (other, "sticky")


async def test_turn_right_after_another_does_not_wait_for_the_table(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as server:
        own = World(server.client(), server.url)
        own.allow("sk-test-key")
        try:
            await add_replicas(own, 4)
            gateway = await own.gateway(session_answer_seconds=30.0)
            homes = [(await turn(gateway, f"s{number}"))[0] for number in range(8)]
            server.client().client_pause(60_000)
            turns = [await turn(gateway, f"s{number}") for number in range(8)]
            assert turns == [(home, "sticky") for home in homes]
        finally:
            server.kill()
            await own.close()


@contextlib.asynccontextmanager
async def session_table(url: str, **options: Any) -> AsyncIterator[SessionTable]:
    """A table on a link of its own."""
    link = RespLink(url, answer_seconds=options.pop("answer_seconds", 5.0))
    try:
        yield SessionTable(link, **{"ttl_seconds": 100, **options})
    finally:
        await link.close()


async def test_repin_that_expects_turns_is_overtaken_by_one_more(world: World) -> None:
    async with session_table(world.url, ttl_seconds=100) as table:
        first = await table.claimed("m", "s", "here")
        await table.claimed("m", "s", "here")
        stays = await table.repinned("m", "s", "there", first.owner_epoch, expected_turns=first.turns)
        assert (stays.owner, stays.owner_epoch, stays.turns) == (owner_digest("here"), 1, 2)
        moves = await table.repinned("m", "s", "there", first.owner_epoch, expected_turns=2)
        assert (moves.owner, moves.owner_epoch, moves.turns) == (owner_digest("there"), 2, 2)


async def test_claims_and_repins_leave_one_owner(world: World) -> None:
    async with session_table(world.url, ttl_seconds=100) as table:
        claims = await asyncio.gather(*(table.claimed("m", "s", f"r{n}") for n in range(10)))
        assert {entry.owner for entry in claims} == {owner_digest("r0")}
        assert sorted(entry.turns for entry in claims) == list(range(1, 11))
        moves = await asyncio.gather(*(table.repinned("m", "s", f"q{n}", 1) for n in range(10)))
        assert {entry.owner for entry in moves} == {owner_digest("q0")}
        assert {entry.owner_epoch for entry in moves} == {2}
        table.note_context("m", "s", 4242)
        entry = await table.claimed("m", "s", "x")
        assert (entry.owner, entry.turns, entry.context_tokens) == (owner_digest("q0"), 11, 4242)
        assert table.calls <= 4  # all that is asked at once is one call
        key, field = session_place("m", "s")
        assert world.redis.hlen(key) == 1
        assert len(world.redis.hget(key, field) or b"") == 24
        assert 100 <= world.redis.ttl(key) <= 113


async def test_look_up_counts_no_turn_and_finds_nothing_where_nothing_is(world: World) -> None:
    async with session_table(world.url) as table:
        assert await table.found("m", "s") == ABSENT
        await table.claimed("m", "s", "r0")
        assert [(await table.found("m", "s")).turns for _ in range(2)] == [1, 1]
        assert await table.found("other", "s") == ABSENT  # a session belongs to a model
        assert len(world.redis.keys("exaops:s:*")) == 1


async def test_sessions_end_with_their_ttl_whatever_others_in_their_hash_do(world: World) -> None:
    clock = int(world.redis.time()[0])
    old = struct.pack("<8sIIII", owner_digest("r0"), 7, 3, 0, clock - 1000)
    young = struct.pack("<8sIIII", owner_digest("r1"), 2, 3, 0, clock - 10)
    async with session_table(world.url, ttl_seconds=100) as table:
        key, field = session_place("m", "s")
        world.redis.hset(key, mapping={field: old, b"neighbour": young})
        assert await table.found("m", "s") == ABSENT
        fresh = await table.claimed("m", "s", "r5")
        assert (fresh.owner, fresh.owner_epoch, fresh.turns) == (owner_digest("r5"), 1, 1)
        # Entries that nobody asks for any more go when others move in.
        world.redis.hset(key, mapping={b"old-%d" % n: old for n in range(100)})
        mates = (f"t{n}" for n in itertools.count())
        for mate in itertools.islice((m for m in mates if session_place("m", m)[0] == key), 16):
            await table.claimed("m", mate, "r5")
        left: list[Any] = world.redis.hkeys(key)  # redis-py takes them for text
        assert not [name for name in left if bytes(name).startswith(b"old-")]
        assert b"neighbour" in left


async def test_session_table_survives_loss_of_its_script_and_of_its_connection(world: World) -> None:
    async with session_table(world.url) as table:
        await table.claimed("m", "s", "r0")
        world.redis.script_flush()
        assert (await table.claimed("m", "s", "r1")).owner == owner_digest("r0")
        world.redis.client_kill_filter(_type="normal", skipme=True)
        answered: list[SessionEntry] = []
        async with asyncio.timeout(5):
            while not answered:  # the call that meets the cut is lost
                with contextlib.suppress(SessionTableUnavailableError):
                    answered.append(await table.claimed("m", "s", "r1"))
                await asyncio.sleep(0.01)
        assert answered[0].owner == owner_digest("r0")


async def test_session_table_gives_up_in_time(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as server:
        async with session_table(server.url, answer_seconds=0.1) as table:
            await table.claimed("m", "s", "r0")
            server.client().client_pause(2000)
            async with asyncio.timeout(1.5):
                with pytest.raises(SessionTableUnavailableError):
                    await table.claimed("m", "s", "r0")


async def test_wrong_password_leaves_sessions_to_the_hash(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as server:
        server.client().config_set("requirepass", "right")
        for password, works in (("wrong", False), ("right", True)):
            async with session_table(f"unix://:{password}@{server.socket}?db=3") as table:
                if works:
                    assert (await table.claimed("m", "s", "r0")).turns == 1
                    continue
                with pytest.raises(SessionTableUnavailableError):
                    await table.claimed("m", "s", "r0")


@pytest.mark.parametrize("cut", range(1, 30))
async def test_answers_are_read_wherever_they_are_cut(cut: int) -> None:
    data = b"+OK\r\n:42\r\n$4\r\na\r\nb\r\n$-1\r\n-ERR no\r\n"
    seen: list[object] = []
    for part, held in ((data[:cut], b""), (data[cut:], data[:cut])):
        pending = held + part if held else part
        position, seen = 0, []
        while True:
            reply, after = read_reply(pending, position)
            if after == position:
                break
            position = after
            seen.append(str(reply) if isinstance(reply, LinkError) else reply)
    assert seen == [b"OK", 42, b"a\r\nb", None, "ERR no"]


async def test_other_routers_session_headers_count_in_the_configured_order(world: World) -> None:
    await add_replicas(world, 1)
    gateway = await world.gateway(session_headers="X-Session-Id, x-smg-routing-key")
    reader = TurnLogReader(world.redis, "c1")
    for given in (
        {"x-session-id": "one", "x-smg-routing-key": "two"},
        {"X-SMG-Routing-Key": "two", "x-user-id": "three"},
        {"x-user-id": "three"},
    ):
        assert (await gateway.ask(headers=given)).status == 200
    refused = await gateway.ask(headers={"x-smg-routing-key": "no such id"})
    assert (refused.status, refused.code) == (400, "invalid_session_id")
    await gateway.shared.turns.flush()
    assert [turn.session_id for _, turn in reader.read(1.0)] == ["one", "two", ""]


async def test_length_of_the_context_is_noted_after_each_turn(world: World) -> None:
    await add_replicas(world, 1)
    gateway = await world.gateway()
    await turn(gateway, "s")
    async with session_table(world.url) as table:
        async with asyncio.timeout(5):
            while not (entry := await table.found("m", "s")).context_tokens:  # noqa: ASYNC110 - in Redis
                await asyncio.sleep(0.01)
    assert entry.context_tokens == 10  # prompt and completion, as the engine counted them


async def test_turns_are_written_with_the_fields_that_readers_know() -> None:
    assert [field.name for field in dataclasses.fields(TurnRecord)] == list(Turn.__struct_fields__)


async def test_each_request_becomes_a_turn_with_its_usage(world: World) -> None:
    reader = TurnLogReader(world.redis, "c1")
    assert reader.read(0.01) == []
    usage = event({"choices": [], "usage": USAGE})
    await world.engine(streams([token("a"), usage, DONE]))
    gateway = await world.gateway()
    await gateway.ask({"model": "m", "stream": True}, headers={"x-session-id": "s"})
    world.engines[0].answer = replies(CHAT)
    await gateway.ask(path="/v1/completions")
    await gateway.shared.turns.flush()
    (_, first), (_, second) = reader.read(1.0)
    for turn_record in (first, second):
        assert turn_record.outcome == "ok"
        assert turn_record.status == 200
        assert turn_record.key_id == "id-sk-test-key"
        assert (turn_record.prompt_tokens, turn_record.completion_tokens) == (7, 3)
        assert turn_record.cached_tokens == 4
        assert turn_record.ttft_seconds is not None
        assert 0 < turn_record.ttft_seconds <= turn_record.duration_seconds
    assert (first.streamed_events, second.streamed_events) == (3, 0)
    assert (first.session_id, first.path) == ("s", "/v1/chat/completions")
    assert (second.session_id, second.path) == ("", "/v1/completions")


async def test_turn_log_survives_loss_of_all_data(world: World) -> None:
    await world.engine(replies(CHAT))
    gateway = await world.gateway()
    reader = TurnLogReader(world.redis, "c1")
    for _ in range(2):
        await gateway.ask()
        await gateway.shared.turns.flush()
        entries = reader.read(1.0)
        assert len(entries) == 1
        reader.ack([entry_id for entry_id, _ in entries])
        assert world.redis.xpending("exaops:turns", "sessions")["pending"] == 0
        world.redis.flushall()
