"""A launch that waits for memory is no failure: recorded, told, shown, and never counted against anyone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import redis

from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import Accelerator
from exaserve_ops.serving.models import Replica
from tests.fakes.fleet import GIB, make_deployment, seen
from tests.fakes.leader import leading
from tests.fakes.scripted_fleet import Fleet
from workers.protocol.observed import MemoryHolder, MemoryWait, ObservedState

pytestmark = pytest.mark.django_db

WAIT = MemoryWait(
    place="GPU-1",
    needed_bytes=60 * GIB,
    free_bytes=12 * GIB,
    total_bytes=80 * GIB,
    waited_seconds=3.0,
    at_most_seconds=300.0,
    holders=(MemoryHolder(kind="unnamed", memory_bytes=68 * GIB),),
)


@pytest.fixture
def fleet(redis_client: redis.Redis) -> Iterator[Fleet]:
    with leading(redis_client) as leader:
        yield Fleet(leader, redis_client, 3)


def told(replica: Replica) -> list[str]:
    events = Event.objects.filter(subject_id=str(replica.pk), event__startswith="memory").order_by("pk")
    return [event.event for event in events]


def test_wait_is_recorded_told_once_and_heals_nobody(fleet: Fleet) -> None:
    make_deployment(replicas=1)
    fleet.settle()
    replica = Replica.objects.get()
    for free in (12, 11, 10):
        fleet.states[str(replica.pk)] = seen(
            replica,
            ObservedState.WAITING,
            attempt=0,
            reason=f"waiting for memory: {free} GiB free",
            memory_wait=WAIT,
        )
        fleet.settle(rounds=2)
    replica.refresh_from_db()
    assert replica.memory_since is not None
    assert replica.held_since is None
    assert told(replica) == ["memory_awaited"]
    Replica.objects.filter(pk=replica.pk).update(memory_since=replica.memory_since - timedelta(minutes=4))
    fleet.settle(rounds=2)
    assert Replica.objects.count() == 1
    assert not Accelerator.objects.filter(quarantined_at__isnull=False).exists()

    assert replica.memory_wait is not None
    assert replica.memory_wait["holders"][0]["memory_bytes"] == 68 * GIB
    assert replica.memory_wait["at_most_seconds"] == 300.0

    del fleet.states[str(replica.pk)]
    fleet.settle()
    replica.refresh_from_db()
    assert (replica.status, replica.memory_wait, replica.memory_since) == ("ready", None, None)
    assert told(replica) == ["memory_awaited", "memory_wait_over"]
    assert replica.restarts == 0
