"""A node's own user in a real Valkey: all that an agent does is allowed, and nothing else is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from exaserve_ops.adapters.store_users import RedisStoreUsers, password_sha256
from exaserve_ops.inventory.domain.store_users import UserPlan
from tests.fakes.node import Node, make_home, make_spec, wait_for
from tests.fakes.valkey import Valkey, running_valkey
from workers.agent.credential import take_own_user
from workers.agent.home import Home
from workers.protocol import digests, names, pulse, store_user, v1
from workers.protocol.observed import ObservedState
from workers.protocol.wish import WantedState

OTHER = str(uuid.uuid4())


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
def users(valkey: Valkey) -> RedisStoreUsers:
    return RedisStoreUsers(valkey.client())


@pytest.fixture
def home(tmp_path: Path, valkey: Valkey, users: RedisStoreUsers) -> Home:
    """A home whose node has its own user, as joining leaves it."""
    home = make_home(tmp_path / "home", valkey.url)
    identity = home.load_identity()
    users.admit(identity.node_id, identity.key)
    url = store_user.url_for(valkey.url, identity.node_id, identity.key)
    home.save_identity(msgspec.structs.replace(identity, redis_url=url))
    return home


@pytest.fixture
def node(home: Home, valkey: Valkey) -> Iterator[Node]:
    node = Node(home, valkey)
    node.start()
    try:
        yield node
    finally:
        node.close()


def acl_log(valkey: Valkey) -> list[dict[str, Any]]:
    """What Redis refused, to anybody."""
    with valkey.client() as client:
        return list(client.acl_log())


def status_of(home: Home) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "workers.agent", "status", "--home", str(home.root)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    said: dict[str, Any] = json.loads(done.stdout)["redis"]
    return said


def raise_epoch(users: RedisStoreUsers, node: Node) -> None:
    """What the control plane does to the user of a node whose keys are revoked."""
    digest = password_sha256(digests.node_key(b"s" * 32, node.node_id, 2))
    users.apply(UserPlan({node.node_id: digest}, frozenset({node.node_id}), frozenset()))


def test_whole_life_of_an_agent_meets_no_refusal(node: Node, valkey: Valkey) -> None:
    node.wish(make_spec("r1"))
    node.wait_state("r1", ObservedState.READY)
    tail = v1.TailLog(
        command_id=str(uuid.uuid4()), lease_epoch=1, deadline_seconds=30, replica_id="r1", seconds=5
    )
    node.send(tail)
    wait_for(lambda: node.all(v1.LogChunk), "log lines")
    wait_for(lambda: valkey.client().exists(pulse.key_of(node.node_id)), "a pulse")
    node.wish(make_spec("r1", generation=2, wanted=WantedState.STOP))
    node.wait_state("r1", ObservedState.STOPPED)
    node.signal(signal.SIGTERM)
    node.start()
    node.wish(make_spec("r2"))
    node.wait_state("r2", ObservedState.READY)
    node.signal(signal.SIGTERM)
    assert acl_log(valkey) == []
    with valkey.client() as client:
        assert {client_of["user"] for client_of in client.client_list()} == {"default"}, "an agent is left"


def forbidden(node_id: str) -> list[tuple[str, ...]]:
    """What a stranger with a node's credential might try."""
    own, other = names.node_queue(node_id), names.node_queue(OTHER)
    reports, session = names.REPORT_STREAM, "exaops:s:chat:abc"
    return [
        # Everything at once.
        *(("KEYS", "*"), ("SCAN", "0"), ("RANDOMKEY",), ("DBSIZE",), ("FLUSHALL",), ("FLUSHDB",)),
        *(("CONFIG", "GET", "*"), ("CONFIG", "SET", "dir", "/"), ("CONFIG", "REWRITE")),
        *(("INFO",), ("MONITOR",), ("SHUTDOWN", "NOSAVE"), ("SAVE",), ("BGSAVE",)),
        *(("REPLICAOF", "203.0.113.1", "6379"), ("SLAVEOF", "NO", "ONE"), ("PSYNC", "?", "-1"), ("SYNC",)),
        *(("SLOWLOG", "GET"), ("MEMORY", "STATS"), ("LATENCY", "LATEST"), ("MODULE", "LIST"), ("COMMAND",)),
        # Users and connections.
        *(("ACL", "LIST"), ("ACL", "WHOAMI"), ("ACL", "USERS"), ("ACL", "SETUSER", "me", "on", "+@all")),
        *(("CLIENT", "LIST"), ("CLIENT", "KILL", "TYPE", "normal"), ("CLIENT", "PAUSE", "1")),
        ("CLIENT", "ID"),
        # Scripts.
        *(("EVAL", "return 1", "0"), ("EVALSHA", "0" * 40, "0"), ("SCRIPT", "LOAD", "return 1")),
        *(("FUNCTION", "LIST"), ("FCALL", "f", "0"), ("EVAL_RO", "return 1", "0")),
        # Talk of others.
        *(("PUBLISH", "exaops:route:changed", "replicas"), ("SUBSCRIBE", "exaops:route:changed")),
        *(("PSUBSCRIBE", "*"), ("PUBSUB", "CHANNELS"), ("SPUBLISH", "a", "b"), ("SSUBSCRIBE", "a")),
        # What others wrote, and what they are to read.
        *(("XRANGE", reports, "-", "+"), ("XREAD", "STREAMS", reports, "0")),
        ("XTRIM", reports, "MAXLEN", "0"),
        *(("DEL", reports), ("SET", reports, "x"), ("LPUSH", reports, "x"), ("XLEN", reports)),
        *(("XGROUP", "DESTROY", reports, "ingest"), ("XACK", reports, "ingest", "0-1")),
        ("XDEL", reports, "0-1"),
        *(("GET", session), ("SET", session, "x"), ("DEL", session), ("EXPIRE", session, "1")),
        *(("HGETALL", "exaops:route:replicas"), ("HSET", "exaops:route:replicas", "r", "x")),
        *(("HGETALL", "exaops:route:keys"), ("INCR", "exaops:route:version")),
        ("XADD", "exaops:turns", "*", "t", "x"),
        *(("SMEMBERS", "exaops:route:models"), ("GET", "exaops:live:summary"), ("GET", "exaops:ssh:1")),
        *(("XADD", f"exaops:log:{OTHER}", "*", "t", "x"), ("SADD", f"_kombu.binding.{own}", "x")),
        *(("LPUSH", "chores", "x"), ("BRPOP", "chores", "1"), ("HGETALL", "unacked"), ("SET", "chores", "x")),
        *(("SET", "exaops:manifest:x", "x"), ("SET", "exaops:manifest:x", "x", "GET")),
        *(("DEL", "exaops:manifest:x"), ("GETDEL", "exaops:manifest:x"), ("STRLEN", "exaops:manifest:x")),
        # Queue and pulse of another node; its own by other means.
        *(("BRPOP", other, "1"), ("LPUSH", other, "x"), ("LRANGE", other, "0", "-1"), ("LLEN", other)),
        *(("BRPOP", own, other, "1"), ("DEL", other), ("SET", other, "x"), ("XADD", other, "*", "a", "b")),
        *(("SET", pulse.key_of(OTHER), "x"), ("GET", pulse.key_of(OTHER)), ("DEL", pulse.key_of(OTHER))),
        *(("SET", own, "x"), ("DEL", own), ("LPUSH", pulse.key_of(node_id), "x")),
        ("GET", pulse.key_of(node_id)),
        *(("SET", pulse.key_of(node_id), "x", "GET"), ("XADD", pulse.key_of(node_id), "*", "a", "b")),
        *(("RENAME", own, other), ("COPY", own, other), ("LMOVE", own, other, "LEFT", "LEFT")),
        *(("DUMP", own), ("RESTORE", own, "0", "x"), ("MIGRATE", "203.0.113.1", "6379", own, "0", "1")),
        *(("TYPE", own), ("EXISTS", own), ("OBJECT", "ENCODING", own), ("SORT", own), ("WATCH", own)),
    ]  # fmt: skip


def test_node_user_may_do_nothing_but_what_its_agent_does(home: Home, valkey: Valkey) -> None:
    identity = home.load_identity()
    with redis.Redis.from_url(identity.redis_url) as client:
        allowed = []
        for command in forbidden(identity.node_id):
            try:
                client.execute_command(*command)
            except redis.exceptions.NoPermissionError:
                continue
            except redis.exceptions.ResponseError as error:
                allowed.append((command, str(error)))
            else:
                allowed.append((command, "done"))
        assert allowed == []
        # The walk can fail: with the same connection, what an agent does is done.
        assert client.xadd(names.REPORT_STREAM, {"m": b"x"})
        assert client.set(pulse.key_of(identity.node_id), b"x", px=500)
        assert client.lpush(names.node_queue(identity.node_id), b"x") == 1
        assert client.brpop([names.node_queue(identity.node_id)], timeout=1)
    with valkey.client() as boss:
        assert boss.exists(names.node_queue(OTHER), "chores", "exaops:s:chat:abc") == 0


def test_wrong_or_missing_password_opens_nothing(home: Home, valkey: Valkey) -> None:
    identity = home.load_identity()
    user = store_user.user_of(identity.node_id)
    for password in ("", "x", digests.store_password(digests.node_key(b"s" * 32, identity.node_id, 2))):
        url = valkey.url.replace("unix://", f"unix://{user}:{password}@")
        with redis.Redis.from_url(url) as client, pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()


def test_password_is_never_sent_to_redis_nor_kept_there(home: Home, valkey: Valkey) -> None:
    identity = home.load_identity()
    with valkey.client() as client:
        said = repr(client.acl_list()) + repr(client.slowlog_get())
    assert digests.store_password(identity.key) not in said
    assert password_sha256(identity.key) in said


def test_revoked_node_is_cut_off_at_once_says_so_and_its_replica_serves_on(
    node: Node, home: Home, users: RedisStoreUsers, valkey: Valkey
) -> None:
    node.wish(make_spec("r1"))
    pid = node.wait_state("r1", ObservedState.READY).pid
    wait_for(lambda: status_of(home) == {"user": "own", "state": "reached", "detail": ""}, "a good link")

    raise_epoch(users, node)

    with valkey.client() as client:
        user = store_user.user_of(node.node_id)
        assert user not in {one["user"] for one in client.client_list()}
    wait_for(lambda: status_of(home)["state"] == "refused", "the refusal in the status")
    assert (
        "WRONGPASS" in status_of(home)["detail"] or "invalid username-password" in status_of(home)["detail"]
    )
    assert "join anew" in status_of(home)["detail"]
    assert "redis refuses this node's credential" in node.log.read_text()
    assert digests.store_password(node.identity.key) not in node.log.read_text()
    assert node.process is not None
    assert node.process.poll() is None
    assert pid is not None
    assert Path(f"/proc/{pid}").exists()


def test_redis_that_lost_its_users_gets_them_again_and_the_agent_goes_on_by_itself(
    node: Node, home: Home, valkey: Valkey
) -> None:
    node.wish(make_spec("r1"))
    pid = node.wait_state("r1", ObservedState.READY).pid
    valkey.kill()
    valkey.start()
    wait_for(lambda: status_of(home)["state"] == "refused", "the refusal")

    with valkey.client() as client:
        RedisStoreUsers(client).admit(node.node_id, node.identity.key)

    node._last_id = b"0"  # the stream began anew
    node.forget_reports()
    assert node.wait_state("r1", ObservedState.READY).pid == pid
    node.wish(make_spec("r1"), make_spec("r2"))
    node.wait_state("r2", ObservedState.READY)
    assert status_of(home)["state"] == "reached"


def test_dropped_user_loses_its_connections(node: Node, users: RedisStoreUsers, valkey: Valkey) -> None:
    wait_for(lambda: node.all(v1.Heartbeat), "a heartbeat")
    users.apply(UserPlan({}, frozenset(), frozenset({node.node_id})))
    with valkey.client() as client:
        wait_for(lambda: {one["user"] for one in client.client_list()} == {"default"}, "no connection of it")
    assert node.node_id not in users.look().nodes


def test_agent_that_joined_with_the_shared_password_takes_its_own_user_once_it_has_one(
    tmp_path: Path, valkey: Valkey
) -> None:
    with valkey.client() as client:
        client.config_set("requirepass", "shared")
        shared = valkey.url.replace("unix://", "unix://:shared@")
        home = make_home(tmp_path / "old", shared)
        assert not take_own_user(home)
        assert home.load_identity().redis_url == shared
        RedisStoreUsers(client).admit(home.load_identity().node_id, home.load_identity().key)
        assert take_own_user(home)
        own = home.load_identity().redis_url
        assert "shared" not in home.identity_file.read_text()
        assert take_own_user(home)
        assert home.load_identity().redis_url == own
        client.config_set("requirepass", "")
    with redis.Redis.from_url(own) as own_client:
        assert own_client.ping()
