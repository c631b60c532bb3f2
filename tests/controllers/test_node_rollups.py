"""A minute of every node is written once it is over, from what its newest heartbeats and answers said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from django.db import connection

from exaserve_ops.controllers.fleet_state import FleetState
from exaserve_ops.controllers.node_rollups import SILENT_SECONDS, NodeRollupRecorder
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.observed import ObservedReplica
from exaserve_ops.serving.domain.reports import HeartbeatReport
from exaserve_ops.telemetry.models import NodeMinute, ReplicaMinute
from exaserve_ops.telemetry.selectors import history_of_node
from exaserve_ops.telemetry.tasks import NODE_RETENTION, RETENTION, retain
from workers.protocol.machine import AcceleratorLoad
from workers.protocol.observed import HostTelemetry, ReplicaTelemetry

pytestmark = pytest.mark.django_db

START = datetime(2026, 3, 1, 12, 0, 10, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[datetime], None]:
    def move(to: datetime) -> None:
        monkeypatch.setattr(clock, "now", lambda: to)

    move(START)
    return move


def heartbeat(node_id: str, *replicas: ObservedReplica, cards: int = 2) -> HeartbeatReport:
    return HeartbeatReport(
        node_id=node_id,
        boot_id="b",
        lease_epoch=1,
        sequence=1,
        sent_at_seconds=0.0,
        applied_revision=1,
        replicas=replicas,
        host=HostTelemetry(cpu_used_ratio=0.5),
        accelerator_loads=tuple(
            AcceleratorLoad(uuid=f"GPU-{n}", ordinal=n, used_ratio=n / 10) for n in range(cards)
        ),
    )


def replica(waiting: int) -> ObservedReplica:
    load = ReplicaTelemetry(window_seconds=10.0, requests_waiting=waiting)
    return ObservedReplica(str(uuid4()), 1, "ready", load=load)


def hear(state: FleetState, beat: HeartbeatReport, at: datetime) -> None:
    view = state.node(beat.node_id)
    view.heartbeat, view.last_report_unix_seconds = beat, at.timestamp()


def test_minute_is_written_when_it_is_over(set_clock: Callable[[datetime], None]) -> None:
    state, node_id = FleetState(), str(uuid4())
    seen = replica(waiting=3)
    hear(state, heartbeat(node_id, seen), START)
    recorder = NodeRollupRecorder(state)
    recorder.count_answer(seen.replica_id, 0.25)
    recorder.count_answer(seen.replica_id, None)
    recorder.count_answer(str(uuid4()), 9.0)
    recorder.step()
    assert not NodeMinute.objects.exists()
    set_clock(START + MINUTE)
    recorder.step()
    row = NodeMinute.objects.get()
    assert (row.node_id, row.minute) == (UUID(node_id), START.replace(second=0))
    assert (row.ttft_p50_seconds, row.ttft_p99_seconds, row.requests_waiting) == (0.25, 0.25, 3.0)
    assert (row.requests_running, row.cpu_used_ratio) == (None, 0.5)
    assert (row.card_ordinals, row.card_used_ratio) == ([0, 1], [0.0, pytest.approx(0.1)])
    assert row.card_power_watts is None
    history = history_of_node(row.node_id, since=START, until=START + MINUTE, step=MINUTE)
    assert {(line.measure.name, line.accelerator) for line in history.lines} == {
        ("ttft_p50_seconds", None), ("ttft_p99_seconds", None), ("requests_waiting", None),
        ("cpu_used_ratio", None), ("card_used_ratio", 0), ("card_used_ratio", 1),
    }  # fmt: skip


def test_first_tokens_of_a_replica_over_several_nodes_are_those_of_its_heads_node(
    set_clock: Callable[[datetime], None],
) -> None:
    state, names = FleetState(), [str(uuid4()) for _ in range(3)]
    wide, alone = replica(waiting=0), replica(waiting=0)
    for name, number in zip(names, (1, 0, 2), strict=True):
        hear(state, heartbeat(name, wide._replace(member_number=number), alone), START)
        alone = replica(waiting=0)
    recorder = NodeRollupRecorder(state)
    recorder.count_answer(wide.replica_id, 0.25)
    recorder.step()
    set_clock(START + MINUTE)
    recorder.step()
    told = {str(row.node_id): row.ttft_p50_seconds for row in NodeMinute.objects.all()}
    assert told == {names[0]: None, names[1]: 0.25, names[2]: None}


def test_figure_too_small_for_the_columns_costs_no_node_its_minute(
    set_clock: Callable[[datetime], None],
) -> None:
    state, tiny, sane = FleetState(), str(uuid4()), str(uuid4())
    odd = HostTelemetry(cpu_used_ratio=1e-60, cpu_busiest_ratio=-1e-60)
    hear(state, replace(heartbeat(tiny), host=odd), START)
    hear(state, heartbeat(sane), START)
    recorder = NodeRollupRecorder(state)
    recorder.step()
    set_clock(START + MINUTE)
    recorder.step()
    told = {str(row.node_id): row.cpu_used_ratio for row in NodeMinute.objects.all()}
    assert told == {tiny: 0.0, sane: 0.5}


def test_node_that_went_silent_leaves_a_gap(set_clock: Callable[[datetime], None]) -> None:
    state, node_id = FleetState(), str(uuid4())
    hear(state, heartbeat(node_id), START - timedelta(seconds=SILENT_SECONDS + 1))
    recorder = NodeRollupRecorder(state)
    recorder.step()
    set_clock(START + MINUTE)
    recorder.step()
    assert not NodeMinute.objects.exists()


def test_minutes_are_forgotten_after_their_retention(set_clock: Callable[[datetime], None]) -> None:
    for age in (NODE_RETENTION - MINUTE, NODE_RETENTION + MINUTE, RETENTION + MINUTE):
        NodeMinute.objects.create(node_id=uuid4(), minute=START - age)
        ReplicaMinute.objects.create(replica_id=uuid4(), minute=START - age)
    set_clock(START)
    assert retain() == 3
    assert (NodeMinute.objects.count(), ReplicaMinute.objects.count()) == (1, 2)


def test_minute_of_a_node_with_eight_cards_stays_under_a_kibibyte() -> None:
    cards = {
        field.name: [0.123] * 8
        for field in NodeMinute._meta.get_fields()
        if field.name.startswith("card_") and field.name != "card_ordinals"
    }
    plain = {
        field.name: 0.5
        for field in NodeMinute._meta.get_fields()
        if field.get_internal_type() == "RealField" and not field.name.startswith("card_")
    }
    NodeMinute.objects.create(node_id=uuid4(), minute=START, card_ordinals=list(range(8)), **plain, **cards)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_column_size(t.*) FROM telemetry_nodeminute t")
        [size_bytes] = cursor.fetchone()
    assert 400 < size_bytes < 1024
