"""Requests share a bounded pool of connections: a rush waits, and is told so when it waits too long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.test import Client

from tests.fakes.race import race
from tests.fakes.world import JsonClient, client_with_key, make_user

pytestmark = pytest.mark.django_db(transaction=True)
RUSH = 30


def pool() -> Any:
    return connection.pool  # type: ignore[attr-defined]  # Postgres has one


@contextmanager
def drained_pool() -> Iterator[None]:
    """Hold every connection, and let nobody wait long for one."""
    maximum, timeout = settings.ENV.database_pool_max_connections, pool().timeout
    connection.close()
    held = [pool().getconn() for _ in range(maximum)]
    pool().timeout = 0.2
    try:
        yield
    finally:
        pool().timeout = timeout
        for each in held:
            pool().putconn(each)


def test_a_rush_of_requests_stays_within_the_pool() -> None:
    client = client_with_key(make_user("reader", "viewer"))

    def request() -> tuple[int, int]:
        status = client.get("/api/v1/nodes").status_code
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
            [(connections,)] = cursor.fetchall()
        return status, connections

    answers = race(*[request] * RUSH)
    assert {status for status, _ in answers} == {200}
    assert max(count for _, count in answers) <= settings.ENV.database_pool_max_connections


def test_request_that_waits_too_long_is_told_to_come_again() -> None:
    client: JsonClient = client_with_key(make_user("reader", "viewer"))
    with drained_pool():
        [answer, ready, alive] = race(
            partial(client.get, "/api/v1/nodes"),
            partial(Client().get, "/readyz"),
            partial(Client().get, "/healthz"),
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer["Retry-After"]) > 0
    assert (ready.status_code, ready.json()) == (503, {"status": "unavailable"})
    assert alive.status_code == 200
    assert client.get("/api/v1/nodes").status_code == 200
