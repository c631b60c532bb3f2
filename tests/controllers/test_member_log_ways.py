"""Logs of members: each is asked of its own node, and no node speaks for another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import UUID, uuid4

import pytest
import redis

from exaserve_ops.adapters.live_store import RedisLiveReader
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.selectors.logs import LOG_HINT, find_log, find_log_by_key, log_number
from tests.fakes.gang_fleet import GangFleet, GangNode
from tests.fakes.leader import leading
from workers.protocol import v1

pytestmark = pytest.mark.django_db


@pytest.fixture
def live_reader() -> RedisLiveReader:
    return RedisLiveReader(os.environ["REDIS_URL"])


@pytest.fixture
def fleet(redis_client: redis.Redis) -> Iterator[GangFleet]:
    with leading(redis_client) as leader:
        yield GangFleet(leader, redis_client)


def asked(one: GangNode) -> list[str]:
    """Replicas whose log its agent is told to send; taken off its queue."""
    return [command.replica_id for command in one.node.commands() if isinstance(command, v1.TailLog)]


def send_line(one: GangNode, replica_id: str, text: str) -> None:
    chunk = v1.LogChunk(node_id=one.node.node_id, replica_id=replica_id, attempt=1, lines=(text,))
    one.node.send(chunk)


def test_log_of_each_member_is_asked_of_its_node_and_kept_apart(
    fleet: GangFleet, live_reader: RedisLiveReader
) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    key = str(replica.pk)
    head, other = fleet.of(replica)
    stranger = next(one for one in fleet.nodes if one not in (head, other))
    for one in (head, other):
        asked(one)
    for number in (0, 1):
        source = find_log(replica.pk, str(number))
        assert source is not None
        fleet.leader.reconcilers.reconcile(LOG_HINT, source.key)
        told = [asked(one) for one in (head, other)]
        assert told == ([[key], []], [[], [key]])[number]
    send_line(head, key, "of the head")
    send_line(other, key, "of the other")
    send_line(stranger, key, "of neither")
    send_line(stranger, "nonsense", "of nothing")
    send_line(stranger, str(uuid4()), "of nobody")
    fleet.leader.ingest.step()
    for number, text in ((0, "of the head"), (1, "of the other")):
        (entry,) = live_reader.read_log(key, number, "0", 10)
        assert entry.lines == (text,)
        assert live_reader.read_log(key, number, entry.position, 10) == []


def test_member_of_an_agent_that_knows_no_members_is_not_asked_and_it_is_said_why(fleet: GangFleet) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    _, other = fleet.of(replica)
    Node.objects.filter(pk=other.node.node_id).update(protocol_minor=6)
    source = find_log(replica.pk, "1")
    assert source is not None
    words = f"{other.node.name} cannot show it: its agent speaks 1.6, and parts need 1.7: update it"
    assert source.problem == words
    asked(other)
    fleet.leader.reconcilers.reconcile(LOG_HINT, source.key)
    assert asked(other) == []


def test_member_that_there_is_not_is_refused_with_those_that_there_are(fleet: GangFleet) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    for wrong in ("2", "-1", "one", "99999", "٣", " 1"):
        with pytest.raises(InvalidInputError, match="it has members 0 to 1: there is no member") as refused:
            find_log(replica.pk, wrong)
        assert refused.value.field == "member"
        assert find_log_by_key(f"{replica.pk}/{wrong}") is None
    assert find_log(uuid4()) is None
    for nonsense in ("", "x", "x/0", f"{uuid4()}/0"):
        fleet.leader.reconcilers.reconcile(LOG_HINT, nonsense)
    replica.members.all().delete()
    with pytest.raises(InvalidInputError, match="its members have no places yet"):
        find_log(replica.pk, "1")
    Replica.objects.filter(pk=replica.pk).update(node_count=1)
    with pytest.raises(InvalidInputError, match="it runs on one node, as member 0"):
        find_log(replica.pk, "1")
    alone = find_log(replica.pk, "0")
    assert alone is not None
    assert alone.node_id == replica.node_id
    assert replica.node_id is not None
    assert log_number(replica.pk, replica.node_id) == 0
    others = Node.objects.exclude(pk=replica.node_id).values_list("pk", flat=True)
    assert {log_number(replica.pk, UUID(str(node_id))) for node_id in others} == {None}


def test_last_lines_of_a_member_that_ended_are_kept_beside_those_of_the_head(fleet: GangFleet) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    _, other = fleet.of(replica)
    other.last_lines = ("NCCL error: peer gone", "bye")
    other.die()
    fleet.round()
    member = replica.members.get(number=1)
    assert (member.exit_attempt, member.exit_signal, member.exit_after_seconds) == (1, 9, 4.0)
    assert member.exit_log_tail == ["NCCL error: peer gone", "bye"]
    replica.refresh_from_db()
    assert replica.exit_attempt is None, "the head has not ended by itself"


def test_reader_who_comes_again_is_told_no_line_twice_and_misses_none(
    fleet: GangFleet, live_reader: RedisLiveReader
) -> None:
    fleet.deploy()
    replica = fleet.until("ready")
    key = str(replica.pk)
    head, _ = fleet.of(replica)
    node_id = head.node.node_id

    def send(*lines: str, attempt: int = 1, is_backlog: bool = True, dropped: int = 0) -> None:
        head.node.send(
            v1.LogChunk(
                node_id=node_id,
                replica_id=key,
                attempt=attempt,
                lines=lines,
                dropped_lines=dropped,
                is_backlog=is_backlog,
            )
        )
        fleet.leader.ingest.step()

    def told() -> list[str]:
        return [line for entry in live_reader.read_log(key, 0, "0", 100) for line in entry.lines]

    send("a", "b", dropped=7)
    send("c", is_backlog=False)
    [*_, last] = live_reader.read_log(key, 0, "0", 100)
    send("b", "c", dropped=8)
    assert told() == ["a", "b", "c"], "what it has already"
    send("a", "b", "c", "d")
    assert told() == ["a", "b", "c", "d"]
    [news] = live_reader.read_log(key, 0, last.position, 100)
    assert (news.lines, news.dropped_lines) == (("d",), 0), "one who read on is told the same"
    send("d", is_backlog=False)
    assert told()[-2:] == ["d", "d"], "a line that is written twice is shown twice"
    send("y", "z", dropped=3)
    assert told()[-2:] == ["y", "z"], "so much came meanwhile that nothing known is among it"
    assert live_reader.read_log(key, 0, "0", 100)[-1].dropped_lines == 3
    send("z", attempt=2)
    assert told()[-2:] == ["z", "z"], "another attempt has lines of its own"
