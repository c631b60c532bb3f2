"""All gateways know where prompts' beginnings are: by each other, and by what replicas say they evicted."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from exaserve_ops.adapters.prefix_news import MOST_DIGESTS, STREAM_KEY, PrefixNews
from exaserve_ops.gateway.plane import open_redis
from exaserve_ops.routing.domain.prefixes import DIGEST_BYTES
from exaserve_ops.routing.domain.records import NodeFacts, ReplicaFacts
from tests.fakes.upstream import CHAT, replies
from tests.gateway.harness import Gateway, World, eventually

pytestmark = pytest.mark.asyncio

PIECES = 12


def chat(topic: int, question: str) -> dict[str, Any]:
    letters = random.Random(topic).choices("abcdefghij ", k=256 * PIECES)  # noqa: S311 - made-up text
    messages = [{"role": "user", "content": "".join(letters) + question}]
    return {"model": "m", "messages": messages}


async def place(gateway: Gateway, topic: int, question: str) -> tuple[str, str]:
    reply = await gateway.ask(chat(topic, question))
    assert reply.status == 200
    return reply.headers["x-exaops-replica"], reply.headers["x-exaops-route"]


async def add_replicas(world: World, count: int) -> None:
    for number in range(count):
        await world.engine(replies(CHAT), node_id=f"n{number // 2}")


async def until_known(gateway: Gateway, beginnings: int) -> None:
    await eventually(lambda: gateway.shared.router.known_beginnings >= beginnings)


async def test_gateway_sends_a_beginning_where_another_one_sent_it(world: World) -> None:
    await add_replicas(world, 8)
    one, other = [await world.gateway() for _ in range(2)]
    home, why = await place(one, 1, "first")
    assert why == "new"
    await until_known(other, PIECES)
    assert [await place(other, 1, f"{n}") for n in range(5)] == [(home, "prefix")] * 5


async def test_gateway_that_has_just_started_knows_what_was_sent_before(world: World) -> None:
    await add_replicas(world, 8)
    first = await world.gateway()
    homes = [(await place(first, topic, "first"))[0] for topic in range(6)]
    await eventually(lambda: world.redis.xlen(STREAM_KEY) > 0)
    for stop in world.stops:
        await stop()
    world.stops.clear()
    late = await world.gateway()
    await until_known(late, 6 * PIECES)
    assert [await place(late, topic, "second") for topic in range(6)] == [(home, "prefix") for home in homes]


async def test_hits_with_two_gateways_are_those_with_one(world: World) -> None:
    await add_replicas(world, 8)

    async def hits(gateways: list[Gateway], topics: range, known_after: int) -> int:
        seen: set[tuple[int, str]] = set()
        found = 0
        for question in range(6):
            for topic in topics:
                replica, _ = await place(gateways[(question + topic) % len(gateways)], topic, f"{question}")
                found += (topic, replica) in seen
                seen.add((topic, replica))
            if question == 0:
                for gateway in gateways:
                    await until_known(gateway, PIECES * known_after)
        return found

    alone = await hits([await world.gateway()], range(20), 20)
    # These hear of the first twenty, too.
    both = await hits([await world.gateway() for _ in range(2)], range(20, 40), 40)
    assert (alone, both) == (100, 100)


async def test_what_a_replica_has_evicted_is_not_counted_on(world: World) -> None:
    await add_replicas(world, 2)
    gateway = await world.gateway(poll_seconds=0.05)
    home, _ = await place(gateway, 1, "first")
    slot = gateway.shared.fleet.find(home)
    assert slot is not None
    said = ReplicaFacts(home, kv_evicted_idle_seconds=3600.0)
    world.writer.write_facts([NodeFacts(slot.record.node_id, 1.0, (said,))])
    await eventually(lambda: slot.evicted_until_seconds > -math.inf)
    assert await place(gateway, 1, "second") == (home, "prefix")
    said = ReplicaFacts(home, kv_evicted_idle_seconds=0.0)
    before = gateway.shared.clock()
    world.writer.write_facts([NodeFacts(slot.record.node_id, 2.0, (said,))])
    await eventually(lambda: slot.evicted_until_seconds > before)
    assert (await place(gateway, 1, "third"))[1] == "new"


async def test_replica_that_was_started_again_has_nothing(world: World) -> None:
    await add_replicas(world, 2)
    gateway = await world.gateway(poll_seconds=0.05)
    home, _ = await place(gateway, 1, "first")
    record = world.records[home]
    world.put(home, record.port, node_id=record.node_id, attempt=2)
    await eventually(lambda: gateway.shared.fleet.find(home).record.attempt == 2)  # type: ignore[union-attr] # it is there
    assert (await place(gateway, 1, "second"))[1] == "new"


async def test_what_is_told_is_bounded_and_damage_is_passed_over(world: World) -> None:
    heard: list[tuple[bytes, int]] = []
    client = open_redis(world.url)
    try:
        teller = PrefixNews(lambda *_: None, clock=lambda: 0.0)
        listener = PrefixNews(
            lambda owner, digests, _: heard.append((owner, len(digests))), clock=lambda: 0.0
        )
        digests = [number.to_bytes(DIGEST_BYTES, "little") for number in range(MOST_DIGESTS)]
        teller.add(b"replica1", digests[:-1])
        teller.add(b"replica2", digests)
        assert teller.dropped == MOST_DIGESTS - 1
        assert await teller.exchange(client)
        world.redis.xadd(STREAM_KEY, {b"g": b"other", b"n": b"\xc1 no message"})
        assert await listener.exchange(client)
        assert await listener.exchange(client)
        assert heard == [(b"replica1", MOST_DIGESTS - 1), (b"replica2", 1)]
    finally:
        await client.aclose()
    nowhere = open_redis("redis://127.0.0.1:1/0")
    assert not await listener.exchange(nowhere)
    await nowhere.aclose()
