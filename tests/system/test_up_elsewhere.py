"""`manage.py up` on stores that somebody else runs."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench.fleet_run import fleet_up, leftovers, start_fleet

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

CODE = Path(__file__).resolve().parents[2]


@pytest.fixture
def database_url() -> Iterator[str]:
    """An empty database of its own, on the server that the tests run on."""
    name = f"up_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        parts = conninfo_to_dict(os.environ["DATABASE_URL"]) | {"dbname": name}
        yield make_conninfo(**{key: value for key, value in parts.items() if value is not None})
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def test_given_stores_are_used_and_left_running(
    tmp_path: Path, database_url: str, redis_client: redis.Redis
) -> None:
    var = tmp_path / "var"
    given = {"DATABASE_URL": database_url, "REDIS_URL": os.environ["REDIS_URL"]}
    with fleet_up(CODE, var, "--no-demo", "--nodes", "1", environment=given) as run:
        assert not {"postgres", "valkey"} & set(run.summary()["pids"])
        nodes = run.get("/api/v1/nodes")["results"]
        assert [(node["name"], node["liveness"]) for node in nodes] == [("node-1", "alive")]
    assert leftovers(var) == ()
    assert redis_client.ping()
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT name FROM inventory_node").fetchall() == [("node-1",)]
    assert not (var / "postgres").exists()


def test_given_redis_that_would_evict_is_refused(
    tmp_path: Path, database_url: str, redis_client: redis.Redis
) -> None:
    policy = redis_client.config_get("maxmemory-policy")["maxmemory-policy"]
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        given = {"DATABASE_URL": database_url, "REDIS_URL": os.environ["REDIS_URL"]}
        run = start_fleet(CODE, tmp_path / "var", "--no-demo", environment=given)
        assert run.process.wait(60) == 1
        assert "CONFIG SET maxmemory-policy noeviction" in run.text()
    finally:
        redis_client.config_set("maxmemory-policy", policy)
