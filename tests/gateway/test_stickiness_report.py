"""Each gateway says how many turns reached the replica that has their session, over its last minutes."""

from __future__ import annotations

import pytest
import redis

from exaserve_ops.adapters.gateway_reports import KEY_PREFIX, GatewayReportReader
from exaserve_ops.gateway.counters import Counters
from exaserve_ops.gateway.recent import WINDOW_SECONDS, RecentTurns
from tests.fakes.upstream import CHAT, replies
from tests.gateway.harness import World, eventually


@pytest.mark.asyncio
async def test_report_counts_returning_turns_and_lives_as_long_as_its_gateway(world: World) -> None:
    for node in range(2):
        await world.engine(replies(CHAT), node_id=f"n{node}")
    gateway = await world.gateway()
    for _ in range(4):
        reply = await gateway.ask(headers={"x-session-id": "s"})
    home = reply.headers["x-exaops-replica"]
    world.put(home, world.records[home].port, node_id=world.records[home].node_id, accepts_new=False)
    await eventually(lambda: not gateway.shared.fleet.find(home).record.accepts_new)  # type: ignore[union-attr] # it is there
    await gateway.ask(headers={"x-session-id": "s"})
    report = gateway.shared.report("g:1")
    assert (report.returning_turns, report.sticky_turns, report.sticky_ratio) == (4, 3, 0.75)
    assert not report.is_route_table_stale
    assert b"exaops_gateway_recent_sticky_ratio 0.75" in gateway.shared.render_metrics()
    reader = GatewayReportReader(world.redis)
    await eventually(reader.read)
    [told] = reader.read() or []
    assert told.gateway.endswith(f":{gateway.shared.settings.port}")
    assert 0 < world.redis.ttl(KEY_PREFIX + told.gateway) <= 15  # type: ignore[operator] # a plain client
    world.redis.set(KEY_PREFIX + "later", b"of a later version")
    assert reader.read() == [told]


def test_window_slides() -> None:
    counters = Counters()
    recent = RecentTurns(counters, 0.0)
    counters.returning_turns, counters.sticky_turns = 10, 5
    assert recent.look(10.0) == (10, 5, 10.0)
    for number in range(2, 30):
        recent.look(number * 10.0)
    counters.returning_turns += 2
    counters.sticky_turns += 2
    returning, sticky, seconds = recent.look(400.0)
    assert (returning, sticky) == (2, 2), "what was before the window no longer counts"
    assert seconds <= WINDOW_SECONDS + 10


def test_store_that_is_away_is_no_empty_list() -> None:
    client = redis.Redis(unix_socket_path="/nowhere/redis.sock")
    assert GatewayReportReader(client).read() is None
