"""What a simulated node says of its machine: figures that follow from what its replicas do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from workers.protocol.machine import AcceleratorLoad
from workers.protocol.observed import HostTelemetry, InterfaceRate, ReplicaObserved

_GIB = 1 << 30
_CORES = 104
_LINK_BYTES_PER_SECOND = 25e9
_PCIE_BYTES_PER_SECOND = 63.016e9
_LINKS = 4
_NVLINK_BYTES_PER_SECOND = _LINKS * 26.562e9
_IDLE_WATTS, _MOST_WATTS = 90.0, 600.0
_IDLE_CELSIUS, _MOST_CELSIUS = 34.0, 78.0
_FULL_REQUESTS = 24
"""So many running ones keep a tile busy all the time."""
_WEIGHTS_RATIO = 0.35
"""Of a tile's memory; the rest is blocks."""
_BYTES_OF_TOKEN = 400_000
"""Through PCIe and between tiles, for each token made or taken in."""
_ANSWER_BYTES = 120
"""Through the network, for each token of an answer."""


def describe_cards(
    uuids: Iterable[str], memory_bytes: int, users: Mapping[str, ReplicaObserved]
) -> tuple[AcceleratorLoad, ...]:
    """Loads of tiles; `users`: the replica on each, by the tile's UUID."""
    return tuple(_card(uuid, ordinal, memory_bytes, users.get(uuid)) for ordinal, uuid in enumerate(uuids))


def describe_host(observed: Iterable[ReplicaObserved], disk_free_bytes: int) -> HostTelemetry:
    """The machine around them."""
    replicas = tuple(observed)
    running = sum(seen.active_requests or 0 for seen in replicas)
    busy = min(1.0, 0.02 + 0.01 * running)
    tokens = sum(map(_tokens_per_second, replicas))
    rate = InterfaceRate(
        receive_bytes_per_second=float(_ANSWER_BYTES * running),
        send_bytes_per_second=_ANSWER_BYTES * tokens,
        link_bytes_per_second=_LINK_BYTES_PER_SECOND,
    )
    return HostTelemetry(
        cpu_used_ratio=busy,
        cpu_busiest_ratio=min(1.0, 2 * busy),
        memory_used_bytes=64 * _GIB,
        memory_total_bytes=512 * _GIB,
        disk_free_bytes=disk_free_bytes,
        load1=round(busy * _CORES, 2),
        network_receive_bytes_per_second=rate.receive_bytes_per_second,
        network_send_bytes_per_second=rate.send_bytes_per_second,
        interfaces={"hsn0": rate},
    )


def _card(uuid: str, ordinal: int, memory_bytes: int, seen: ReplicaObserved | None) -> AcceleratorLoad:
    running = (seen.active_requests or 0) if seen is not None else 0
    used = min(1.0, running / _FULL_REQUESTS)
    telemetry = seen.telemetry if seen is not None else None
    blocks_ratio = telemetry.kv_used_ratio if telemetry is not None else None
    tokens = 0.0 if seen is None else _tokens_per_second(seen)
    return AcceleratorLoad(
        uuid=uuid,
        ordinal=ordinal,
        sources=("simulated",),
        used_ratio=round(used, 3),
        memory_used_bytes=0
        if telemetry is None
        else int(memory_bytes * (_WEIGHTS_RATIO + (1 - _WEIGHTS_RATIO) * (blocks_ratio or 0.0))),
        memory_total_bytes=memory_bytes,
        pcie_receive_bytes_per_second=round(tokens * _BYTES_OF_TOKEN / 10),
        pcie_send_bytes_per_second=round(tokens * _BYTES_OF_TOKEN / 20),
        pcie_link_bytes_per_second=_PCIE_BYTES_PER_SECOND,
        nvlinks=_LINKS,
        nvlinks_up=_LINKS,
        nvlink_receive_bytes_per_second=round(tokens * _BYTES_OF_TOKEN),
        nvlink_send_bytes_per_second=round(tokens * _BYTES_OF_TOKEN),
        nvlink_link_bytes_per_second=_NVLINK_BYTES_PER_SECOND,
        power_watts=round(_IDLE_WATTS + used * (_MOST_WATTS - _IDLE_WATTS), 1),
        power_limit_watts=_MOST_WATTS,
        temperature_celsius=round(_IDLE_CELSIUS + used * (_MOST_CELSIUS - _IDLE_CELSIUS)),
        held_back_by=(),
    )


def _tokens_per_second(seen: ReplicaObserved) -> float:
    telemetry = seen.telemetry
    if telemetry is None:
        return 0.0
    return (telemetry.generation_tokens_per_second or 0.0) + (telemetry.prompt_tokens_per_second or 0.0)
