"""One leads; who comes after it is sure that whoever led before changes nothing any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest
import redis
from django.db import connection, transaction
from django.db.utils import Error as DatabaseError

from exaserve_ops.adapters.leadership import FencedError, LeaderLease
from exaserve_ops.adapters.route_table import MODELS_KEY, REPLICAS_KEY, OvertakenError, RouteTableWriter
from exaserve_ops.health.models import LeaderLease as LeaseRow
from exaserve_ops.inventory.models import FailureDomain
from tests.fakes.node import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def make_lease() -> Iterator[Callable[..., LeaderLease]]:
    """Leases on the very database that the test's own connection uses."""
    connection.ensure_connection()
    info = connection.connection.info
    url = psycopg.conninfo.make_conninfo(**info.get_parameters(), password=info.password)
    made = []

    def make(holder: str, *, seconds: float = 30.0) -> LeaderLease:
        made.append(LeaderLease(url, holder, lease_seconds=seconds))
        return made[-1]

    yield make
    for lease in made:
        lease.release()


def in_fenced_thread(lease: LeaderLease, work: Callable[[], None]) -> threading.Thread:
    """Run as a leader's loop does; the thread's database connection ends with it."""

    def run() -> None:
        with lease.fenced():
            try:
                work()
            finally:
                connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_the_lead_is_held_by_one_and_passes_on_the_moment_it_is_given_up(
    make_lease: Callable[..., LeaderLease],
) -> None:
    first, second = make_lease("first"), make_lease("second")
    assert wait_for(first.acquire, "the first to lead")
    assert not second.acquire()
    assert first.renew()
    first.release()
    assert second.acquire()
    assert second.epoch == first.epoch + 1
    assert second.idle_seconds == 0.0
    assert LeaseRow.objects.get().holder == "second"


def test_a_lease_that_runs_out_is_taken_and_its_holder_learns_it(
    make_lease: Callable[..., LeaderLease],
) -> None:
    first, second = make_lease("first", seconds=0.3), make_lease("second")
    assert wait_for(first.acquire, "the first to lead")
    assert wait_for(second.acquire, "the second to take over", seconds=5)
    assert not first.is_held()
    assert not first.renew()
    assert second.idle_seconds >= 0.3


def test_a_leader_that_renews_in_time_is_never_replaced(make_lease: Callable[..., LeaderLease]) -> None:
    first, second = make_lease("first", seconds=1.0), make_lease("second")
    assert wait_for(first.acquire, "the first to lead")
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        assert first.renew()
        assert not second.acquire()
        time.sleep(0.1)  # the pace of renewals is what is tested


def test_a_leader_that_wakes_up_late_changes_nothing(make_lease: Callable[..., LeaderLease]) -> None:
    first, second = make_lease("first", seconds=0.2), make_lease("second")
    assert wait_for(first.acquire, "the first to lead")
    woken, refused = threading.Event(), []

    def work() -> None:
        with transaction.atomic():
            FailureDomain.objects.create(kind="rack", name="before")
        woken.wait(10)
        try:
            with transaction.atomic():
                FailureDomain.objects.create(kind="rack", name="after")
        except FencedError as error:
            refused.append(error)

    thread = in_fenced_thread(first, work)
    assert wait_for(second.acquire, "the second to take over", seconds=5)
    woken.set()
    thread.join(10)
    assert [str(error) for error in refused] == [
        f"epoch {first.epoch} is over; the lead is at epoch {second.epoch}"
    ]
    assert list(FailureDomain.objects.values_list("name", flat=True)) == ["before"]


def test_a_take_over_waits_for_what_the_old_leader_has_under_way(
    make_lease: Callable[..., LeaderLease],
) -> None:
    first, second = make_lease("first", seconds=0.2), make_lease("second")
    assert wait_for(first.acquire, "the first to lead")
    begun, go_on, taken = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with transaction.atomic():
            FailureDomain.objects.create(kind="rack", name="under way")
            begun.set()
            go_on.wait(1.0)

    def take() -> None:
        wait_for(second.acquire, "the second to take over")
        assert FailureDomain.objects.filter(name="under way").exists()
        connection.close()
        taken.set()

    worker = in_fenced_thread(first, work)
    assert begun.wait(10)
    taker = threading.Thread(target=take)
    taker.start()
    assert not taken.wait(0.5)
    go_on.set()
    worker.join(10)
    taker.join(10)
    assert taken.is_set()


def test_a_leader_that_stands_still_in_a_transaction_holds_nobody_up(
    make_lease: Callable[..., LeaderLease],
) -> None:
    first, second = make_lease("first", seconds=0.2), make_lease("second")
    assert wait_for(first.acquire, "the first to lead")
    begun, go_on, failed = threading.Event(), threading.Event(), []

    def work() -> None:
        try:
            with transaction.atomic():
                FailureDomain.objects.create(kind="rack", name="stuck")
                begun.set()
                go_on.wait(20)
                FailureDomain.objects.create(kind="rack", name="too late")
        except DatabaseError as error:
            failed.append(error)

    thread = in_fenced_thread(first, work)
    assert begun.wait(10)
    assert wait_for(second.acquire, "the second to take over", seconds=10)
    go_on.set()
    thread.join(10)
    assert failed
    assert not FailureDomain.objects.exists()


def test_an_old_leader_cannot_write_the_route_table(redis_client: redis.Redis) -> None:
    old, new = RouteTableWriter(redis_client), RouteTableWriter(redis_client)
    old.claim(4)
    assert old.write_models(frozenset({"a"}))
    new.claim(5)
    assert new.write_replicas({})  # nothing changed, and yet: from now on the old one is shut out
    with pytest.raises(OvertakenError):
        old.write_models(frozenset({"stale"}))
    assert redis_client.smembers(MODELS_KEY) == {b"a"}
    assert not redis_client.exists(REPLICAS_KEY)
    assert new.write_models(frozenset({"b"}))


def test_threads_of_one_leader_do_not_shut_one_another_out(redis_client: redis.Redis) -> None:
    writer = RouteTableWriter(redis_client)
    writer.claim(3)
    start, failed = threading.Barrier(4), []

    def write(number: int) -> None:
        start.wait(10)
        try:
            for turn in range(20):
                writer.write_models(frozenset({f"m{number}-{turn}"}))
        except OvertakenError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failed == []
