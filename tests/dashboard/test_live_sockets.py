"""Sockets over a real channel layer: handshake, fan-out, slow readers, log tails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
import redis
from asgiref.sync import sync_to_async
from channels.layers import channel_layers, get_channel_layer
from channels.routing import URLRouter
from django.contrib.auth.models import AnonymousUser, User
from django.test import Client

from exaserve_ops.access.services import create_api_key, revoke_api_key
from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.dashboard.live import feed, handshake, sockets, tail
from exaserve_ops.dashboard.live.mailbox import MAX_EVENTS, Mailbox
from exaserve_ops.dashboard.live.tasks import end
from exaserve_ops.dashboard.routing import websocket_urlpatterns
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.services.replicas import create_replicas
from exaserve_ops.telemetry.domain.pictures import LogEntry
from tests.dashboard.conftest import MemoryReader
from tests.fakes.gang_records import make_gang_of_two
from tests.fakes.live_fleet import PaperFleet
from tests.fakes.socket_client import SocketClient
from tests.fakes.world import NOW, make_deployment, make_user

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio]

OWN_ORIGIN = (b"origin", b"http://127.0.0.1:8000")
DEADLINE_SECONDS = 10.0


@pytest_asyncio.fixture(autouse=True)
async def layer() -> AsyncIterator[None]:
    """A channel layer of this test's own event loop."""
    channel_layers.backends.clear()
    yield
    for shard in get_channel_layer()._shards:
        if shard._receive_task is not None:
            await end(shard._receive_task)  # the layer's own flush cancels once, and may wait for ever
        shard._receive_task = None
    await get_channel_layer().flush()
    channel_layers.backends.clear()


@pytest_asyncio.fixture
async def user() -> User:
    return await sync_to_async(make_user)("vera", "viewer")


def communicator(
    path: str, user: Any, *headers: tuple[bytes, bytes], query: str = "", session: Any = None
) -> SocketClient:
    host = (b"host", b"127.0.0.1:8000")
    return SocketClient(
        URLRouter(websocket_urlpatterns),
        f"{path}?{query}",
        user=user,
        headers=[host, *headers],
        session=session,
    )


@asynccontextmanager
async def opened(path: str, user: Any, *, query: str = "") -> AsyncIterator[SocketClient]:
    socket = communicator(path, user, OWN_ORIGIN, query=query)
    accepted, _ = await socket.connect()
    assert accepted
    try:
        yield socket
    finally:
        await socket.disconnect()


async def until(socket: SocketClient, kind: str) -> Any:
    """The next message of a kind; `frame` is bytes."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            message = await socket.receive_output(DEADLINE_SECONDS)
            if kind == "frame" and message.get("bytes"):
                return message["bytes"]
            if message.get("text") and json.loads(message["text"])["kind"] == kind:
                return json.loads(message["text"])


@pytest.mark.parametrize(
    "origin",
    [b"https://evil.example", b"null", b"http://127.0.0.1:9999", b"http://127.0.0.1", b"file://", b""],
)
async def test_a_cookie_from_a_foreign_page_opens_nothing_and_the_log_says_why(
    user: User, origin: bytes, reader: MemoryReader, caplog: pytest.LogCaptureFixture
) -> None:
    accepted, code = await communicator("/ws/live/", user, (b"origin", origin)).connect()
    assert (accepted, code) == (False, 4401)
    assert "origin" in caplog.text
    assert reader.frame_reads == 0


async def test_no_origin_needs_an_api_key(user: User, reader: MemoryReader) -> None:
    reader.show(PaperFleet(client=None).picture())  # type: ignore[arg-type]  # nothing is published
    accepted, _ = await communicator("/ws/live/", user).connect()
    assert not accepted, "a cookie alone is no proof without an origin"
    make = sync_to_async(create_api_key)
    _, text = await make(user=user, name="cli", scopes=["api"], actor="test", now=clock.now())
    bearer = (b"authorization", f"Bearer {text}".encode())
    socket = communicator("/ws/live/", AnonymousUser(), bearer)
    accepted, _ = await socket.connect()
    assert accepted
    await socket.disconnect()
    _, other = await make(user=user, name="gw", scopes=["inference"], actor="test", now=clock.now())
    bearer = (b"authorization", f"Bearer {other}".encode())
    accepted, _ = await communicator("/ws/live/", AnonymousUser(), bearer).connect()
    assert not accepted, "a key for inference does not open the operations"


async def closing(socket: SocketClient) -> Any:
    """The message that closes a socket, after whatever came before it."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (message := await socket.receive_output(DEADLINE_SECONDS))["type"] != "websocket.close":
            pass
    return message


def _log_in(user: User) -> tuple[Client, Any]:
    client = Client()
    client.force_login(user)
    return client, client.session


async def test_a_socket_ends_with_the_login_that_opened_it(
    user: User, reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "RECHECK_SECONDS", 0.05)
    reader.show(PaperFleet(client=None).picture())  # type: ignore[arg-type]  # nothing is published
    client, session = await sync_to_async(_log_in)(user)
    socket = communicator("/ws/live/", user, OWN_ORIGIN, session=session)
    assert (await socket.connect())[0]
    await until(socket, "frame")
    assert await socket.receive_nothing(0.3), "several checks of a login that stands change nothing"
    await sync_to_async(client.logout)()
    message = await closing(socket)
    assert (message["code"], message["reason"]) == (4401, "nobody is logged in")
    await socket.wait(DEADLINE_SECONDS)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "live feed"]


async def test_a_socket_ends_when_its_user_loses_the_right_or_the_account(
    user: User, reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "RECHECK_SECONDS", 0.05)
    assert reader.frame is None
    _, session = await sync_to_async(_log_in)(user)
    socket = communicator("/ws/live/", user, OWN_ORIGIN, session=session)
    assert (await socket.connect())[0]
    await sync_to_async(user.groups.clear)()
    assert "lacks" in (await closing(socket))["reason"]
    other = await sync_to_async(make_user)("walt", "viewer")
    _, session = await sync_to_async(_log_in)(other)
    socket = communicator("/ws/live/", other, OWN_ORIGIN, session=session)
    assert (await socket.connect())[0]
    other.is_active = False
    await sync_to_async(other.save)()
    assert (await closing(socket))["code"] == 4401


async def test_a_socket_ends_when_its_api_key_is_revoked(
    user: User, reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "RECHECK_SECONDS", 0.05)
    assert reader.frame is None
    key, text = await sync_to_async(create_api_key)(
        user=user, name="cli", scopes=["api"], actor="test", now=clock.now()
    )
    socket = communicator("/ws/live/", AnonymousUser(), (b"authorization", f"Bearer {text}".encode()))
    assert (await socket.connect())[0]
    await sync_to_async(revoke_api_key)(key, actor="test", now=clock.now())
    assert (await closing(socket))["code"] == 4401


async def test_strangers_and_users_without_rights_are_refused(reader: MemoryReader) -> None:
    for someone in (AnonymousUser(), await sync_to_async(make_user)("nobody")):
        accepted, _ = await communicator("/ws/live/", someone, OWN_ORIGIN).connect()
        assert not accepted
    assert reader.frame_reads == 0


async def test_a_page_gets_the_newest_of_everything_at_once(user: User, reader: MemoryReader) -> None:
    picture = PaperFleet(client=None).picture()  # type: ignore[arg-type]  # nothing is published
    reader.show(picture)
    async with opened("/ws/live/", user) as socket:
        hello = await until(socket, "hello")
        assert abs(hello["now"] - clock.unix_seconds()) < 60
        assert (await until(socket, "layout"))["version"] == 1
        assert (await until(socket, "summary"))["summary"]["nodes"]["alive"] == 3
        assert await until(socket, "frame") == picture.frame


async def test_a_hint_brings_the_next_frame_and_one_read_serves_all_viewers(
    user: User, reader: MemoryReader
) -> None:
    fleet = PaperFleet(client=None)  # type: ignore[arg-type]  # nothing is published
    reader.show(fleet.picture())
    async with opened("/ws/live/", user) as first, opened("/ws/live/", user) as second:
        for socket in (first, second):
            await until(socket, "frame")
        before = reader.frame_reads
        picture = fleet.picture(lambda _cell: 0.9)
        reader.show(picture)
        await get_channel_layer().group_send("live", {"type": "live.frame", "sequence": 2})
        assert await until(first, "frame") == picture.frame
        assert await until(second, "frame") == picture.frame
        assert reader.frame_reads - before <= 2, "each viewer read for itself"


async def test_a_lost_hint_costs_seconds_not_the_frame(
    user: User, reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "POLL_SECONDS", 0.05)
    fleet = PaperFleet(client=None)  # type: ignore[arg-type]  # nothing is published
    reader.show(fleet.picture())
    async with opened("/ws/live/", user) as socket:
        await until(socket, "frame")
        picture = fleet.picture(lambda _cell: 0.1)
        reader.show(picture)
        assert await until(socket, "frame") == picture.frame


async def test_bytes_that_are_no_frame_are_dropped_and_the_feed_lives_on(
    user: User, reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "POLL_SECONDS", 0.05)
    fleet = PaperFleet(client=None)  # type: ignore[arg-type]  # nothing is published
    reader.frame = b"rubbish"
    async with opened("/ws/live/", user) as socket:
        await until(socket, "hello")
        picture = fleet.picture()
        reader.show(picture)
        assert await until(socket, "frame") == picture.frame


async def test_a_resync_sends_everything_again(user: User, reader: MemoryReader) -> None:
    picture = PaperFleet(client=None).picture()  # type: ignore[arg-type]  # nothing is published
    reader.show(picture)
    async with opened("/ws/live/", user) as socket:
        await until(socket, "frame")
        await socket.send_text("not json")
        await socket.send_text(json.dumps({"kind": "resync"}))
        assert (await until(socket, "layout"))["version"] == 1
        assert await until(socket, "frame") == picture.frame


async def test_events_arrive_once_and_a_returning_page_gets_what_it_missed(
    user: User, reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reader.frame is None
    monkeypatch.setattr(feed, "EVENTS_SECONDS", 0.05)
    record = sync_to_async(record_event)
    async with opened("/ws/live/", user) as socket:
        await until(socket, "hello")
        subject = Subject("node", str(uuid4()), "gpu-1")
        event = await record(subject, "lost", actor="controller:health", now=NOW, moved=("alive", "dead"))
        for _ in range(3):
            await get_channel_layer().group_send("events", {"type": "live.events", "last_id": event.pk})
        message = await until(socket, "events")
        assert [(e["id"], e["name"], e["to"]) for e in message["events"]] == [(event.pk, "gpu-1", "dead")]
        second = await record(subject, "recovered", actor="controller:health", now=NOW)
        await get_channel_layer().group_send("events", {"type": "live.events", "last_id": second.pk})
        assert [e["id"] for e in (await until(socket, "events"))["events"]] == [second.pk]
    async with opened("/ws/live/", user, query=f"events_after={event.pk}") as socket:
        assert second.pk in {e["id"] for e in (await until(socket, "events"))["events"]}


async def test_a_slow_reader_gets_the_newest_frame_only_and_costs_no_memory() -> None:
    mailbox = Mailbox()
    for number in range(1000):
        mailbox.put("frame", f"frame {number}")
        mailbox.put_events([{"id": number}])
    snapshots, events, lost = await mailbox.take()
    assert snapshots == ["frame 999"]
    assert len(events) == MAX_EVENTS
    assert events[-1] == {"id": 999}
    assert lost == 1000 - MAX_EVENTS


async def test_a_client_that_takes_nothing_is_sent_away_with_try_again_later(
    user: User, reader: MemoryReader
) -> None:
    reader.show(PaperFleet(client=None).picture())  # type: ignore[arg-type]  # nothing is published
    sent: list[dict[str, Any]] = []
    ever = asyncio.Event()

    async def full_socket(message: dict[str, Any]) -> None:
        sent.append(message)
        if message.get("bytes"):
            await ever.wait()

    async def silent_client() -> dict[str, Any]:
        if not sent:
            return {"type": "websocket.connect"}
        await ever.wait()
        raise AssertionError("never set")

    scope = {"type": "websocket", "user": user, "query_string": b"", "send_seconds": 0.05}
    async with asyncio.timeout(DEADLINE_SECONDS):
        await sockets.live_socket(scope, silent_client, full_socket)
    assert sent[-1]["type"] == "websocket.close"
    assert sent[-1]["code"] == 1013


async def test_the_reader_stops_with_its_last_viewer(user: User, reader: MemoryReader) -> None:
    reader.show(PaperFleet(client=None).picture())  # type: ignore[arg-type]  # nothing is published
    async with opened("/ws/live/", user) as socket:
        await until(socket, "frame")
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "live feed"]


async def _replica_id() -> str:
    def make() -> str:
        deployment = make_deployment()
        return str(create_replicas(deployment.pk, 1, why="", actor="test", now=NOW)[0].pk)

    return await sync_to_async(make)()


async def test_a_log_is_followed_in_batches_and_resumes_where_it_was(
    user: User, reader: MemoryReader
) -> None:
    replica_id = await _replica_id()
    reader.log = [LogEntry(f"{i:04d}", 1, (f"line {i}",), 0) for i in range(20)]
    async with opened(f"/ws/replicas/{replica_id}/log/", user) as socket:
        message = await until(socket, "log")
        assert [line["text"] for line in message["lines"]] == [f"line {i}" for i in range(20)]
        assert message["position"] == "0019"
        reader.log.append(LogEntry("0020", 2, ("after restart",), 7))
        await get_channel_layer().group_send(f"log.{replica_id}.0", {"type": "live.log"})
        message = await until(socket, "log")
        assert message["lines"] == [{"attempt": 2, "text": "after restart"}]
        assert message["dropped"] == 7
    async with opened(f"/ws/replicas/{replica_id}/log/", user, query="after=0018") as socket:
        assert len((await until(socket, "log"))["lines"]) == 2


async def test_each_member_of_a_replica_over_several_nodes_has_a_log_of_its_own(
    user: User, reader: MemoryReader
) -> None:
    replica_id = str((await sync_to_async(make_gang_of_two)()).pk)
    reader.log = [LogEntry("0001", 1, ("of the head",), 0)]
    reader.member_logs[1] = [LogEntry("0001", 3, ("of the other",), 0)]
    address = f"/ws/replicas/{replica_id}/log/"
    for query, text in (("", "of the head"), ("member=0", "of the head"), ("member=1", "of the other")):
        async with opened(address, user, query=query) as socket:
            assert [line["text"] for line in (await until(socket, "log"))["lines"]] == [text]
    async with opened(address, user, query="member=1&after=0001") as socket:
        reader.member_logs[1].append(LogEntry("0002", 3, ("more",), 0))
        await get_channel_layer().group_send(f"log.{replica_id}.1", {"type": "live.log"})
        assert (await until(socket, "log"))["lines"] == [{"attempt": 3, "text": "more"}]
    async with opened(address, user, query="member=2") as socket:
        closing = await socket.receive_output(DEADLINE_SECONDS)
        assert closing["code"] == sockets.NOT_FOUND
        assert closing["reason"] == "it has members 0 to 1: there is no member '2'"
    await sync_to_async(Node.objects.filter(name="wide-1").update)(protocol_minor=6)
    async with opened(address, user, query="member=1") as socket:
        closing = await socket.receive_output(DEADLINE_SECONDS)
        assert (closing["code"], "update it" in closing["reason"]) == (sockets.UNABLE, True)


async def test_a_thousand_lines_a_second_become_few_messages_that_count_what_they_drop(
    user: User, reader: MemoryReader
) -> None:
    replica_id = await _replica_id()
    reader.log = [LogEntry(f"{i:04d}", 1, tuple(f"{i}-{j}" for j in range(10)), 0) for i in range(200)]
    async with opened(f"/ws/replicas/{replica_id}/log/", user) as socket:
        message = await until(socket, "log")
    assert len(message["lines"]) == tail.MAX_LINES
    assert message["dropped"] == 2000 - tail.MAX_LINES
    assert message["lines"][-1]["text"] == "199-9"


async def test_an_enormous_line_is_cut() -> None:
    message = tail.log_message([LogEntry("1", 1, ("x" * 40_000_000, "y"), 0)])
    assert len(json.dumps(message)) < 256 * 1024
    assert message["lines"][-1]["text"] == "y"


async def test_too_many_logs_and_unknown_replicas_close_with_a_reason(
    user: User, reader: MemoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reader.log == []
    monkeypatch.setattr(sockets, "TAILS_PER_USER", 1)
    replica_id = await _replica_id()
    address = f"/ws/replicas/{replica_id}/log/"
    async with opened(address, user), opened(address, user) as second:
        closing = await second.receive_output(DEADLINE_SECONDS)
        assert (closing["code"], "already" in closing["reason"]) == (sockets.TOO_MANY, True)
    async with opened(f"/ws/replicas/{uuid4()}/log/", user) as socket:
        assert (await socket.receive_output(DEADLINE_SECONDS))["code"] == sockets.NOT_FOUND


async def test_viewers_that_come_and_go_leave_nothing_behind_in_redis(
    user: User, reader: MemoryReader, redis_client: redis.Redis
) -> None:
    reader.show(PaperFleet(client=redis_client).picture())
    for _ in range(20):
        async with opened("/ws/live/", user) as socket:
            await until(socket, "frame")
    assert redis_client.dbsize() == 0


def kv_of(sequence: int) -> dict[str, Any]:
    return {"received_at": 9.0, "sequence": sequence, "pools": [{"pool_id": str(sequence)}], "replicas": {}}


async def test_kv_memory_of_a_node_is_sent_to_those_who_watch_it_and_only_when_it_is_new(
    user: User, reader: MemoryReader
) -> None:
    node_id = str(uuid4())
    reader.kv[node_id] = kv_of(1)
    fleet = PaperFleet(client=None)  # type: ignore[arg-type]  # nothing is published
    async with opened("/ws/live/", user) as watcher, opened("/ws/live/", user) as other:
        for nonsense in ("{", "[]", '{"kind": "watch_kv"}', '{"kind": "watch_kv", "node": "x"}'):
            await watcher.send_input({"type": "websocket.receive", "text": nonsense})
        ask = json.dumps({"kind": "watch_kv", "node": node_id})
        await watcher.send_input({"type": "websocket.receive", "text": ask})
        first = await until(watcher, "kv")
        assert (first["node"], first["pools"]) == (node_id, [{"pool_id": "1"}])
        reader.kv[node_id] = kv_of(2)
        kinds = await kinds_until_frame(watcher, reader, fleet)
        assert kinds.count("kv") == 1
        assert "kv" not in await kinds_until_frame(watcher, reader, fleet), "it was not reported anew"
        assert "kv" not in await kinds_until_frame(other, reader, fleet)


async def kinds_until_frame(socket: SocketClient, reader: MemoryReader, fleet: PaperFleet) -> list[str]:
    """Kinds of the messages that come with the next two frames, so that what belongs to one is there."""
    kinds: list[str] = []
    for _ in range(2):
        reader.show(fleet.picture())
        await get_channel_layer().group_send("live", {"type": "live.frame", "sequence": fleet.sequence})
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                message = await socket.receive_output(DEADLINE_SECONDS)
                if message.get("bytes"):
                    break
                if message.get("text"):
                    kinds.append(json.loads(message["text"])["kind"])
    return kinds
