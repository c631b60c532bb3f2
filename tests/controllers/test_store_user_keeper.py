"""The control plane keeps a user in Redis for each node, whatever becomes of Redis or of the node."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
import redis
from django.db import connection
from django.test.utils import CaptureQueriesContext

from exaserve_ops.adapters.store_users import RedisStoreUsers, password_sha256
from exaserve_ops.controllers.store_users import StoreUserKeeper
from exaserve_ops.inventory.domain.store_users import StoreAwayError
from exaserve_ops.inventory.models import FailureDomain, Node
from exaserve_ops.inventory.services import revoke_node_keys
from exaserve_ops.lib import clock
from exaserve_ops.serving.services.replicas import retire_lost_node
from tests.fakes.valkey import Valkey, running_valkey
from tests.fakes.world import make_node
from workers.protocol import digests, store_user

SECRET = b"f" * 32

pytestmark = pytest.mark.django_db


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
def keeper(valkey: Valkey) -> StoreUserKeeper:
    return make_keeper(valkey.url)


def make_keeper(url: str) -> StoreUserKeeper:
    def password_of(node_id: str, key_epoch: int) -> str:
        return password_sha256(digests.node_key(SECRET, node_id, key_epoch))

    return StoreUserKeeper(RedisStoreUsers(redis.Redis.from_url(url)), password_of)


def url_of(valkey: Valkey, node: Node, epoch: int = 1) -> str:
    return store_user.url_for(valkey.url, str(node.pk), digests.node_key(SECRET, str(node.pk), epoch))


def opens(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return False


def calls(valkey: Valkey, command: str) -> int:
    with valkey.client() as client:
        stats = client.info("commandstats").get(f"cmdstat_{command}", {})
    return int(stats.get("calls", 0))


def test_every_node_in_service_has_its_own_user(valkey: Valkey, keeper: StoreUserKeeper) -> None:
    nodes = [make_node("a"), make_node("b")]
    keeper.step()
    assert [opens(url_of(valkey, node)) for node in nodes] == [True, True]
    assert not opens(url_of(valkey, nodes[0], epoch=2))


def test_second_look_writes_nothing_and_new_nodes_alone_are_written(
    valkey: Valkey, keeper: StoreUserKeeper
) -> None:
    make_node("a")
    keeper.step()
    keeper.step()
    assert calls(valkey, "acl|setuser") == 1
    make_node("b")
    keeper.step()
    assert calls(valkey, "acl|setuser") == 2


def test_raised_epoch_ends_the_connections_and_the_password(valkey: Valkey, keeper: StoreUserKeeper) -> None:
    node, other = make_node("a"), make_node("b")
    keeper.step()
    with (
        redis.Redis.from_url(url_of(valkey, node)) as bad,
        redis.Redis.from_url(url_of(valkey, other)) as good,
    ):
        assert bad.ping()
        assert good.ping()
        before = client_ids(valkey, other)
        revoke_node_keys(node.pk, actor="user:test", now=clock.now())
        keeper.step()
        assert client_ids(valkey, node) == set()
        assert client_ids(valkey, other) == before
        with pytest.raises(redis.AuthenticationError):
            bad.ping()
    assert not opens(url_of(valkey, node))


def test_epoch_raised_while_nobody_led_is_found_by_the_next_leader(valkey: Valkey) -> None:
    node, other = make_node("a"), make_node("b")
    make_keeper(valkey.url).step()
    with (
        redis.Redis.from_url(url_of(valkey, node)) as bad,
        redis.Redis.from_url(url_of(valkey, other)) as good,
    ):
        assert bad.ping()
        assert good.ping()
        revoke_node_keys(node.pk, actor="user:test", now=clock.now())
        before = client_ids(valkey, other)
        make_keeper(valkey.url).step()
        assert client_ids(valkey, node) == set()
        assert client_ids(valkey, other) == before, "a new leader must not disturb those in good standing"


def test_retired_node_loses_its_user_and_strangers_keep_theirs(
    valkey: Valkey, keeper: StoreUserKeeper
) -> None:
    node = make_node("a")
    with valkey.client() as client:
        client.execute_command("ACL", "SETUSER", "somebody", "on", ">x", "+ping")
        client.execute_command("ACL", "SETUSER", store_user.user_of("long-gone"), "on", ">x", "+ping")
    keeper.step()
    Node.objects.filter(pk=node.pk).update(liveness="dead")
    retire_lost_node(node.pk, reason="sold", actor="user:test", now=clock.now())
    keeper.step()
    with valkey.client() as client:
        assert set(client.acl_users()) == {"default", "somebody"}


def test_redis_that_was_restarted_empty_gets_all_users_again(valkey: Valkey, keeper: StoreUserKeeper) -> None:
    node = make_node("a")
    keeper.step()
    valkey.kill()
    with pytest.raises(StoreAwayError):
        keeper.step()
    valkey.start()
    assert not opens(url_of(valkey, node))
    keeper.step()
    assert opens(url_of(valkey, node))


def test_user_that_somebody_deleted_comes_back(valkey: Valkey, keeper: StoreUserKeeper) -> None:
    node = make_node("a")
    keeper.step()
    with valkey.client() as client:
        client.acl_deluser(store_user.user_of(str(node.pk)))
    keeper.step()
    assert opens(url_of(valkey, node))


def test_node_that_joins_beside_a_look_keeps_its_connections(valkey: Valkey, keeper: StoreUserKeeper) -> None:
    keeper.step()
    node = make_node("a")
    RedisStoreUsers(valkey.client()).admit(str(node.pk), digests.node_key(SECRET, str(node.pk), 1))
    with redis.Redis.from_url(url_of(valkey, node)) as client:
        assert client.ping()
        before = client_ids(valkey, node)
        keeper.step()
        assert client_ids(valkey, node) == before != set()


def test_rights_of_an_earlier_release_are_set_right(valkey: Valkey, keeper: StoreUserKeeper) -> None:
    node = make_node("a")
    user = store_user.user_of(str(node.pk))
    digest = password_sha256(digests.node_key(SECRET, str(node.pk), 1))
    with valkey.client() as client:
        client.execute_command("ACL", "SETUSER", user, "on", f"#{digest}", "~*", "+@all")
        keeper.step()
        assert b"~*" not in client.execute_command("ACL", "GETUSER", user)[b"keys"]
    with redis.Redis.from_url(url_of(valkey, node)) as own, pytest.raises(redis.exceptions.NoPermissionError):
        own.keys("*")


def test_thousand_nodes_cost_one_query_and_a_few_exchanges(valkey: Valkey, keeper: StoreUserKeeper) -> None:
    domain = FailureDomain.objects.create(kind="host", name="h")
    Node.objects.bulk_create(
        Node(pk=UUID(int=n), name=f"n{n}", failure_domain=domain) for n in range(1, 1025)
    )
    keeper.step()
    with valkey.client() as client:
        assert len(client.acl_users()) == 1025
    reads = calls(valkey, "acl|getuser")
    with CaptureQueriesContext(
        connection,
    ) as queries:
        keeper.step()
    assert len(queries) == 1
    assert calls(valkey, "acl|setuser") == 1024
    assert calls(valkey, "acl|getuser") == reads + 1, "only the default user is looked at"


def test_redis_that_makes_no_users_is_told_with_what_to_do(
    valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    with valkey.client() as client:
        client.execute_command("ACL", "SETUSER", "guest", "on", ">x", "~*", "&*", "+@all", "-acl")
    keeper = make_keeper(valkey.url.replace("unix://", "unix://guest:x@"))
    caplog.set_level(logging.ERROR)
    for _ in range(3):
        keeper.step()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "each power of two, or the log would fill"
    assert "EXAOPS_REDIS_NODE_USERS=off" in said[0]


def test_open_redis_is_told_once(valkey: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    keeper = make_keeper(valkey.url)
    keeper.step()
    keeper.step()
    assert caplog.text.count("event=store_is_open") == 1
    caplog.clear()
    with valkey.client() as client:
        client.config_set("requirepass", "shared")
    make_keeper(valkey.url.replace("unix://", "unix://:shared@")).step()
    assert "store_is_open" not in caplog.text


def client_ids(valkey: Valkey, node: Node) -> set[str]:
    """Connections that a node's user holds."""
    user = store_user.user_of(str(node.pk))
    with valkey.client() as client:
        return {one["id"] for one in client.client_list() if one["user"] == user}
