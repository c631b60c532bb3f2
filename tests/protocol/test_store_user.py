"""A node's own user in Redis: who it is, and how it gets into an address."""

from __future__ import annotations

import pytest
from redis.connection import parse_url

from workers.agent.redis_link import kombu_url
from workers.protocol import digests, store_user

NODE = "8a9f1f0e-2b1c-4f0f-9d56-0f6e0d2b7a11"
KEY = digests.node_key(b"s" * 32, NODE, 1)


@pytest.mark.parametrize(
    ("shared", "left"),
    [
        ("redis://:shared@redis.example:6380/2", {"host": "redis.example", "port": 6380, "db": 2}),
        ("rediss://boss:shared@[::1]/0?ssl_cert_reqs=required", {"host": "::1", "db": 0}),
        ("unix://:shared@/run/valkey.sock?db=1", {"path": "/run/valkey.sock", "db": 1}),
        ("unix:///run/valkey.sock?db=0&username=boss&password=shared", {"path": "/run/valkey.sock"}),
    ],
)
def test_shared_password_is_replaced_wherever_it_stands_and_the_rest_is_kept(
    shared: str, left: dict[str, object]
) -> None:
    own = store_user.url_for(shared, NODE, KEY)
    said = parse_url(own)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
    assert said["username"] == store_user.user_of(NODE)
    assert said["password"] == digests.store_password(KEY)
    assert left.items() <= said.items()
    assert "shared" not in own + kombu_url(own)
    assert "boss" not in own
    assert store_user.is_own(own, NODE)
    assert not store_user.is_own(shared, NODE)


def test_password_differs_by_node_by_epoch_and_from_every_other_key() -> None:
    other_node = digests.node_key(b"s" * 32, "other", 1)
    other_epoch = digests.node_key(b"s" * 32, NODE, 2)
    passwords = {digests.store_password(key) for key in (KEY, other_node, other_epoch)}
    assert len(passwords) == 3
    for key in (KEY, digests.report_key(KEY), digests.command_key(KEY)):
        assert key.hex() not in "".join(passwords)


def test_user_names_lead_back_to_their_nodes_and_strangers_to_none() -> None:
    assert store_user.node_of(store_user.user_of(NODE)) == NODE
    assert store_user.node_of("default") is None
    assert store_user.node_of("somebody") is None
