"""When a report arrived, and what becomes of its load: exactly what the agent said, and no copy of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import get_type_hints
from uuid import uuid4

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exaserve_ops.adapters import reports as report_adapter
from exaserve_ops.adapters.reports import RedisReportSource, describe_heartbeat
from exaserve_ops.adapters.route_table import FACTS_KEY, RouteTableWriter, decode_table
from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.controllers.changes import Remembered
from exaserve_ops.controllers.fleet_state import FleetState, NodeView
from exaserve_ops.controllers.ingest import Ingest
from exaserve_ops.controllers.live import _node_facts
from exaserve_ops.controllers.loop import KeyQueue
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.observed import ReplicaLoad
from exaserve_ops.serving.domain.reports import HeartbeatReport, Received
from tests.fakes.fleet import ScriptedNode
from tests.fakes.kv_pools import load_of
from tests.fakes.leader import Leader, leading
from workers.protocol import names, v1
from workers.protocol.observed import (
    AgentLiveness,
    HostTelemetry,
    ObservedState,
    ReplicaObserved,
    ReplicaTelemetry,
)

NODE = "6c1e6f0a-0000-4000-8000-000000000001"
KEY = b"k" * 32


class Batches:
    """A source of reports that a test fills."""

    def __init__(self) -> None:
        self.next: list[Received] = []
        self.acknowledged: list[str] = []

    def read(self, *, limit: int, block_seconds: float) -> list[Received]:  # noqa: ARG002 - as the port says
        batch, self.next = self.next, []
        return batch

    def acknowledge(self, positions: Sequence[str]) -> None:
        self.acknowledged += positions


class NobodyHome:
    """Takes what is sent to agents, and publishes nothing."""

    def request_hello(self, node_id: str, *, lease_epoch: int, reason: str) -> None: ...


@pytest.fixture
def source() -> Batches:
    return Batches()


@pytest.fixture
def ingest(source: Batches) -> Ingest:
    home = NobodyHome()
    return Ingest(source, home, home, FleetState(), KeyQueue())  # type: ignore[arg-type]  # no lease, no log here


def heard(ingest: Ingest) -> float:
    at = ingest._state.node(NODE).last_report_seconds
    assert at is not None
    return at


def beat(sequence: int, age_seconds: float) -> Received:
    return Received(f"{sequence}-0", HeartbeatReport(NODE, "boot", 0, sequence, 0.0, 0), age_seconds)


def test_report_counts_from_when_it_arrived_and_not_from_when_it_was_read(
    ingest: Ingest, source: Batches
) -> None:
    ingest.last_read_seconds -= 10.0  # the last read was so long ago
    source.next = [beat(1, age_seconds=2.0)]
    ingest.step()
    assert ingest.last_read_seconds - heard(ingest) == pytest.approx(2.0, abs=1e-6)
    assert source.acknowledged == ["1-0"]


def test_odd_clock_of_the_store_makes_no_report_older_than_the_read_before(
    ingest: Ingest, source: Batches
) -> None:
    before = ingest.last_read_seconds
    source.next = [beat(1, age_seconds=3600.0)]
    ingest.step()
    assert before <= heard(ingest) <= ingest.last_read_seconds


def test_reports_taken_in_together_are_still_so_many_in_a_row(ingest: Ingest, source: Batches) -> None:
    ingest.last_read_seconds -= 10.0
    source.next = [beat(1, 8.0), beat(2, 4.5), beat(3, 3.5)]
    ingest.step()
    # The gap of 3.5 s between the first two began a new row, although both were read at once.
    assert ingest._state.node(NODE).reports_since_dead == 2


def test_age_is_told_by_the_clock_that_numbers_the_reports(redis_client: redis.Redis) -> None:
    source = RedisReportSource(redis_client, "test", lambda _: KEY)
    source.read(limit=1, block_seconds=0.001)
    seconds, _ = redis_client.time()
    data = v1.encode_report(make_beat(), node_id=NODE, node_key=KEY)
    redis_client.xadd(names.REPORT_STREAM, {"m": data}, id=f"{(seconds - 30) * 1000}-0")
    redis_client.xadd(names.REPORT_STREAM, {"m": data})
    late, fresh = source.read(limit=10, block_seconds=0.001)
    assert 30.0 <= late.age_seconds < 60.0
    assert fresh.age_seconds < 25.0


@pytest.fixture
def leader(redis_client: redis.Redis, db: None) -> Iterator[Leader]:  # noqa: ARG001 - opens the database
    with leading(redis_client) as leader:
        yield leader


def test_same_words_again_are_another_sign_of_life(leader: Leader, redis_client: redis.Redis) -> None:
    node = ScriptedNode(redis_client)
    node.enrol()
    node.say_hello()
    leader.work()
    node.commands()
    seen = []
    for _ in range(3):
        node.beat()
        leader.ingest.step()
        view = leader.state.node(node.node_id)
        seen.append((view.last_report_seconds, view.reports_since_dead, view.sequence))
    times, rows, sequences = zip(*seen, strict=True)
    assert list(times) == sorted(set(times))
    assert rows == (1, 2, 3)
    assert sequences == (1, 2, 3)


def test_record_is_read_again_only_after_something_happened(db: None) -> None:  # noqa: ARG001 - opens the database
    reads: list[float] = []
    remembered = Remembered(lambda: reads.append(time.monotonic()) or len(reads))
    assert [remembered.get() for _ in range(3)] == [1, 1, 1]
    record_event(Subject("node", "1", "n"), "cordoned", actor="test", now=clock.now())
    assert [remembered.get() for _ in range(3)] == [2, 2, 2]
    impatient = Remembered(lambda: reads.append(0.0) or len(reads), read_anyway_seconds=0.0)
    assert [impatient.get(), impatient.get()] == [3, 4]


def test_load_is_what_the_protocol_calls_telemetry() -> None:
    load, telemetry = get_type_hints(ReplicaLoad), get_type_hints(ReplicaTelemetry)
    assert load
    assert {name: telemetry.get(name) for name in load} == load


ratios = st.none() | st.floats(0.0, 1.0)
counts = st.none() | st.integers(0, 1 << 40)
telemetry = st.none() | st.builds(
    ReplicaTelemetry,
    window_seconds=st.just(10.0),
    requests_running=counts,
    requests_waiting=counts,
    kv_used_ratio=ratios,
    ttft_p95_seconds=st.none() | st.floats(allow_nan=False),
    prefix_hit_ratio=ratios,
    kv_evicted_idle_seconds=st.none() | st.floats(0.0, 1e6),
)


def make_beat(*loads: ReplicaTelemetry | None) -> v1.Heartbeat:
    return v1.Heartbeat(
        node_id=NODE,
        boot_id="boot",
        lease_epoch=1,
        sequence=7,
        sent_at_seconds=5.0,
        applied_revision=3,
        liveness=AgentLiveness(),
        host=HostTelemetry(load1=0.5),
        replicas=tuple(
            ReplicaObserved(replica_id=str(uuid4()), generation=1, state=ObservedState.READY, telemetry=load)
            for load in loads
        ),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(telemetry, max_size=5))
def test_gateways_and_pages_are_told_exactly_what_the_agent_said(
    redis_client: redis.Redis, loads: list[ReplicaTelemetry | None]
) -> None:
    said = make_beat(*loads)
    encoded = v1.open_envelope(v1.encode_report(said, node_id=NODE, node_key=KEY)).body
    report = report_adapter._translate(said, encoded)
    assert isinstance(report, HeartbeatReport)
    view = NodeView(NODE, last_report_unix_seconds=9.0, heartbeat=report)
    RouteTableWriter(redis_client).write_facts([_node_facts(view, report, {})])
    answer = [b"1", set(), {}, redis_client.hgetall(FACTS_KEY), {}, set(), set()]
    [told] = decode_table(answer).facts.values()
    assert told.received_at_seconds == 9.0
    assert [tuple(facts) for facts in told.replicas] == [
        (
            seen.replica_id,
            *(getattr(seen.telemetry, name, None) for name in FACTS),
            1.0,
            getattr(seen.telemetry, "kv_evicted_idle_seconds", None),
        )
        for seen in said.replicas
    ]
    shown = describe_heartbeat(report.encoded)
    assert shown["host"]["load1"] == 0.5
    for seen in said.replicas:
        page = shown["replicas"][seen.replica_id]
        assert page["state"] == "ready"
        assert (page["load"] is None) == (seen.telemetry is None)
        for name in FACTS if page["load"] else ():
            assert page["load"][name] == getattr(seen.telemetry, name)


def test_what_an_engine_with_tiers_says_can_be_answered_as_json() -> None:
    said = make_beat(load_of())
    encoded = v1.open_envelope(v1.encode_report(said, node_id=NODE, node_key=KEY)).body
    [shown] = json.loads(json.dumps(describe_heartbeat(encoded)))["replicas"].values()
    assert [tier["name"] for tier in shown["load"]["kv_tiers"]] == ["accelerator", "host", "disk"]
    assert shown["load"]["kv_swaps"]["blocks_out"] == 34


FACTS = ("requests_running", "requests_waiting", "kv_used_ratio", "ttft_p95_seconds")
