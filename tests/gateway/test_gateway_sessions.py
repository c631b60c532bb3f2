"""Sessions stay where their context is, on every gateway, with and without Redis."""

from __future__ import annotations

import asyncio
import collections
from pathlib import Path

import pytest

from exaserve_ops.adapters.session_table import SessionTable, SessionTableUnavailableError
from exaserve_ops.adapters.turn_log import TurnLogReader
from exaserve_ops.gateway.plane import open_redis
from tests.fakes.upstream import CHAT, DONE, USAGE, event, replies, streams, token
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
    for number in range(6):
        for session in range(25):
            replica, why = await turn(gateways[(number + session) % 2], f"s{session}")
            homes[f"s{session}"].add(replica)
            whys[why] += 1
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert len(set.union(*homes.values())) == 4  # and they are spread
    assert whys == {"new": 25, "sticky": 125}
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


async def test_claims_and_repins_leave_one_owner(world: World) -> None:
    client = open_redis(world.url)
    table = SessionTable(client, ttl_seconds=100)
    claims = await asyncio.gather(*(table.claim("m", "s", f"r{n}") for n in range(10)))
    owner = claims[0].replica_id
    assert {entry.replica_id for entry in claims} == {owner}
    assert sorted(entry.turns for entry in claims) == list(range(1, 11))
    moves = await asyncio.gather(*(table.repin("m", "s", f"q{n}", 1) for n in range(10)))
    assert len({entry.replica_id for entry in moves}) == 1
    assert {entry.owner_epoch for entry in moves} == {2}
    await table.note_context("m", "s", 4242)
    assert (await table.claim("m", "s", "x")).context_tokens == 4242
    assert 0 < world.redis.ttl("exaops:s:m:s") <= 100
    await client.aclose()


async def test_session_table_gives_up_in_time(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as server:
        client = open_redis(server.url)
        table = SessionTable(client, answer_seconds=0.1)
        await table.claim("m", "s", "r0")
        assert server.process is not None
        server.client().client_pause(2000)
        async with asyncio.timeout(1.5):
            with pytest.raises(SessionTableUnavailableError):
                await table.claim("m", "s", "r0")
        await client.aclose()


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
