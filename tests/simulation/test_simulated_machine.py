"""Loads of simulated cards follow from what their replicas do, and say that they are simulated."""

from __future__ import annotations

from workers.protocol.observed import ObservedState, ReplicaObserved, ReplicaTelemetry
from workers.simulation.machine import describe_cards, describe_host

GIB = 1 << 30


def busy(running: int) -> ReplicaObserved:
    return ReplicaObserved(
        replica_id="r",
        generation=1,
        state=ObservedState.READY,
        active_requests=running,
        telemetry=ReplicaTelemetry(
            window_seconds=10.0, kv_used_ratio=1.0, generation_tokens_per_second=100.0
        ),
    )


def test_card_is_as_busy_as_its_replica() -> None:
    idle, used = describe_cards(("a", "b"), 64 * GIB, {"b": busy(6)})
    assert (idle.uuid, idle.ordinal, idle.sources) == ("a", 0, ("simulated",))
    assert (idle.used_ratio, idle.memory_used_bytes, idle.nvlink_send_bytes_per_second) == (0.0, 0, 0)
    assert (used.used_ratio, used.memory_used_bytes) == (0.25, 64 * GIB)
    assert used.power_watts is not None
    assert idle.power_watts is not None
    assert used.power_watts > idle.power_watts
    [more] = describe_cards(("b",), 64 * GIB, {"b": busy(10_000)})
    assert more.used_ratio == 1.0


def test_host_carries_the_answers_of_all_its_replicas() -> None:
    host = describe_host([busy(2), busy(4)], disk_free_bytes=7)
    assert host.disk_free_bytes == 7
    assert host.network_send_bytes_per_second == host.interfaces["hsn0"].send_bytes_per_second > 0
    assert host.cpu_used_ratio is not None
    assert host.cpu_busiest_ratio is not None
    assert 0 < host.cpu_used_ratio <= host.cpu_busiest_ratio <= 1
