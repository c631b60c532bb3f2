"""What a gateway reads at each poll: load always, the rest only where it changed."""

from __future__ import annotations

import pytest
import redis
import redis.asyncio

from exaserve_ops.adapters.route_table import RouteTable, RouteTableReader, RouteTableWriter
from exaserve_ops.routing.domain.records import NodeFacts, ReplicaFacts
from tests.fakes.valkey import Valkey

pytestmark = pytest.mark.asyncio


async def test_new_load_alone_leaves_the_rest_of_the_table_as_it_was(
    valkey: Valkey, store: redis.Redis
) -> None:
    writer, tables = RouteTableWriter(store), list[RouteTable]()
    writer.write_models(frozenset({"chat"}))
    writer.write_replicas({})
    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        reader = RouteTableReader(client, tables.append, lambda _: None)
        assert await reader._poll()
        writer.write_facts([NodeFacts("n1", 1.0, (ReplicaFacts("r1", 2, None, 0.5),))])
        assert await reader._poll()
        writer.write_models(frozenset({"chat", "code"}))
        assert await reader._poll()
    first, second, third = tables
    assert second.replicas is first.replicas
    assert second.version == first.version
    assert second.facts == {"n1": NodeFacts("n1", 1.0, (ReplicaFacts("r1", 2, None, 0.5),))}
    assert third.replicas is not first.replicas
    assert (third.models, third.facts) == (frozenset({"chat", "code"}), second.facts)


async def test_load_that_cannot_be_read_is_dropped_and_counted(valkey: Valkey, store: redis.Redis) -> None:
    writer, tables = RouteTableWriter(store), list[RouteTable]()
    writer.write_replicas({})
    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        reader = RouteTableReader(client, tables.append, lambda _: None)
        await reader._poll()
        store.hset("exaops:route:facts", "n1", b"\xc1")
        await reader._poll()
    assert (tables[1].dropped, tables[1].facts) == (1, {})
