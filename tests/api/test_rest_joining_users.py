"""Joining makes the node's own user in Redis, and says so where it cannot."""

from __future__ import annotations

import dataclasses
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.conf import LazySettings
from django.conf import settings as django_settings

from exaserve_ops.adapters.store_users import RedisStoreUsers
from exaserve_ops.api.ports import store_users
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import create_join_token
from exaserve_ops.lib import clock
from tests.fakes.world import JsonClient

JOIN = "/api/v1/agent/join"

pytestmark = pytest.mark.django_db


def join(token: str, node_id: str) -> Any:
    wish = {"token": token, "node_id": node_id, "name": "n1", "hostname": "h", "address": "10.0.0.1"}
    return JsonClient().post(JOIN, wish | {"agent_version": "0.1", "major": 1, "minor": 0})


@pytest.fixture
def token() -> str:
    return create_join_token(actor="test", now=clock.now())[1]


@pytest.fixture
def shared_url(settings: LazySettings) -> str:
    """An address with a password that all nodes would share."""
    url = django_settings.ENV.redis_url.replace("unix://", "unix://:shared@")
    settings.ENV = dataclasses.replace(django_settings.ENV, agent_redis_url=url)
    return str(url)


def test_joined_node_is_let_in_as_itself_and_never_learns_the_shared_password(
    token: str, shared_url: str
) -> None:
    node_id = str(uuid4())
    answer = join(token, node_id)
    assert answer.status_code == 201
    assert "shared" in shared_url
    assert "shared" not in answer.content.decode()
    with redis.Redis.from_url(answer.json()["redis_url"]) as client:
        assert client.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.get("exaops:s:chat:x")


def test_switched_off_gives_the_shared_address_and_makes_no_user(
    token: str, shared_url: str, settings: LazySettings
) -> None:
    settings.ENV = dataclasses.replace(settings.ENV, redis_node_users=False)
    node_id = str(uuid4())
    answer = join(token, node_id)
    assert answer.json()["redis_url"] == shared_url
    assert node_id not in store_users().look().nodes  # type: ignore[attr-defined]  # the real one


@pytest.mark.usefixtures("shared_url")
def test_redis_that_makes_no_users_is_no_reason_to_give_out_the_shared_password(token: str) -> None:
    url = django_settings.ENV.redis_url
    with redis.Redis.from_url(url) as boss:
        boss.execute_command("ACL", "SETUSER", "guest", "reset", "on", ">x", "~*", "&*", "+@all", "-acl")
        guest = redis.Redis.from_url(url.replace("unix://", "unix://guest:x@"))
        able = store_users()
        store_users.use(RedisStoreUsers(guest))
        node_id = str(uuid4())
        refused = join(token, node_id)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert "EXAOPS_REDIS_NODE_USERS=off" in refused.json()["error"]["message"]
        assert "shared" not in refused.content.decode().replace("all share", "")
        # Mended, the same token does: nothing was spent on the try.
        store_users.use(able)
        assert join(token, node_id).status_code == 201
        boss.acl_deluser("guest")
    assert Node.objects.count() == 1


def test_redis_that_is_away_is_worth_another_try(token: str) -> None:
    able = store_users()
    store_users.use(RedisStoreUsers(redis.Redis(unix_socket_path="/nowhere/redis.sock")))
    node_id = str(uuid4())
    away = join(token, node_id)
    assert (away.status_code, away["Retry-After"]) == (503, "2")
    store_users.use(able)
    assert join(token, node_id).status_code == 201
