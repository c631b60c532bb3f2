"""Hints arrive at commit and not before."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from django.db import connection, transaction

from exaserve_ops.adapters.doorbell import PostgresDoorbell
from exaserve_ops.lib.hints import ring

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def url() -> str:
    """Address of the very database that the test's own connection uses."""
    connection.ensure_connection()
    return psycopg.conninfo.make_conninfo(
        **connection.connection.info.get_parameters(), password=connection.connection.info.password
    )


@pytest.fixture
def doorbell(url: str) -> Iterator[PostgresDoorbell]:
    bell = PostgresDoorbell(url)
    assert bell.wait(0.0) == []
    yield bell
    bell.close()


def test_a_hint_rings_at_commit_once_however_often_it_was_given(doorbell: PostgresDoorbell) -> None:
    with transaction.atomic():
        for _ in range(3):
            ring("deployment", "a")
        ring("node", "b:c")
        assert doorbell.wait(0.05) == []
    assert doorbell.wait(5.0) == [("deployment", "a"), ("node", "b:c")]


def test_a_transaction_that_is_rolled_back_rings_nothing(doorbell: PostgresDoorbell) -> None:
    with transaction.atomic():
        ring("deployment", "a")
        transaction.set_rollback(True)
    assert doorbell.wait(0.1) == []


def test_a_doorbell_whose_connection_is_cut_raises_once_and_then_listens_again(
    doorbell: PostgresDoorbell, url: str
) -> None:
    with psycopg.connect(url, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        )
    with pytest.raises(psycopg.Error):
        doorbell.wait(5.0)
    assert doorbell.wait(0.0) == []
    ring("node", "x")
    assert doorbell.wait(5.0) == [("node", "x")]
