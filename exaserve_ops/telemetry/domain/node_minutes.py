"""What is kept of a node's machine: one row a minute, with its cards side by side in lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from exaserve_ops.telemetry.domain.machine_loads import (
    CardLoad,
    HostLoad,
    links_use,
    nvlink_bytes_per_second,
    nvlink_use,
    pcie_bytes_per_second,
    pcie_use,
    received,
    sent,
    used_share,
)
from exaserve_ops.telemetry.domain.windows import quantile

MOST_ANSWERS = 4096
"""First tokens of a node that one minute's quantiles are made of: the newest."""
MOST_CARDS = 64
"""Of one node; higher ordinals are no card's."""
_LARGEST = 1e30
"""Beyond it, as NaN, a figure is left out: one node's nonsense must not spoil what is written of all."""
_SMALLEST = 1e-30
"""Nearer to nothing, a figure is 0: the columns, of single precision, refuse what they cannot hold."""
Kind = Literal["mean", "most"]


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a minute. Its name is the column's."""

    name: str
    unit: str
    """`ratio`, `bytes_per_second`, `seconds`, `requests`, `watts` or `celsius`."""
    kind: Kind
    """What becomes of several samples: their mean, or the highest of what hurts when it peaks."""


@dataclass(frozen=True, slots=True)
class HostMeasure(Measure):
    """A figure of the machine."""

    read: Callable[[HostLoad], float | None]


@dataclass(frozen=True, slots=True)
class CardMeasure(Measure):
    """A figure of each card."""

    read: Callable[[CardLoad], float | None]


HOST_MEASURES = (
    HostMeasure("cpu_used_ratio", "ratio", "mean", lambda host: host.cpu_used_ratio),
    HostMeasure("cpu_busiest_ratio", "ratio", "mean", lambda host: host.cpu_busiest_ratio),
    HostMeasure("cpu_stalled_ratio", "ratio", "most", lambda host: host.cpu_stalled_ratio),
    HostMeasure(
        "memory_used_ratio", "ratio", "most",
        lambda host: used_share(host.memory_used_bytes, host.memory_total_bytes),
    ),
    HostMeasure("memory_stalled_ratio", "ratio", "most", lambda host: host.memory_stalled_ratio),
    HostMeasure("network_used_ratio", "ratio", "most", lambda host: links_use(host.interfaces)),
    HostMeasure(
        "network_receive_bytes_per_second", "bytes_per_second", "mean",
        lambda host: host.network_receive_bytes_per_second,
    ),
    HostMeasure(
        "network_send_bytes_per_second", "bytes_per_second", "mean",
        lambda host: host.network_send_bytes_per_second,
    ),
    HostMeasure("rdma_used_ratio", "ratio", "most", lambda host: links_use(host.rdma)),
    HostMeasure(
        "rdma_receive_bytes_per_second", "bytes_per_second", "mean", lambda host: received(host.rdma)
    ),
    HostMeasure("rdma_send_bytes_per_second", "bytes_per_second", "mean", lambda host: sent(host.rdma)),
    HostMeasure(
        "disk_read_bytes_per_second", "bytes_per_second", "mean", lambda host: host.disk_read_bytes_per_second
    ),
    HostMeasure(
        "disk_write_bytes_per_second", "bytes_per_second", "mean",
        lambda host: host.disk_write_bytes_per_second,
    ),
    HostMeasure("io_stalled_ratio", "ratio", "most", lambda host: host.io_stalled_ratio),
)  # fmt: skip
CARD_MEASURES = (
    CardMeasure("card_used_ratio", "ratio", "mean", lambda card: card.used_ratio),
    CardMeasure(
        "card_memory_ratio", "ratio", "most",
        lambda card: used_share(card.memory_used_bytes, card.memory_total_bytes),
    ),
    CardMeasure("card_pcie_ratio", "ratio", "most", pcie_use),
    CardMeasure("card_pcie_bytes_per_second", "bytes_per_second", "mean", pcie_bytes_per_second),
    CardMeasure("card_nvlink_ratio", "ratio", "most", nvlink_use),
    CardMeasure("card_nvlink_bytes_per_second", "bytes_per_second", "mean", nvlink_bytes_per_second),
    CardMeasure("card_power_watts", "watts", "mean", lambda card: card.power_watts),
    CardMeasure("card_temperature_celsius", "celsius", "most", lambda card: card.temperature_celsius),
    CardMeasure(
        "card_held_back_ratio", "ratio", "mean",
        lambda card: None if card.held_back_by is None else float(bool(card.held_back_by)),
    ),
)  # fmt: skip
SERVING_MEASURES = (
    Measure("ttft_p50_seconds", "seconds", "mean"),
    Measure("ttft_p99_seconds", "seconds", "most"),
    Measure("requests_running", "requests", "mean"),
    Measure("requests_waiting", "requests", "most"),
)
"""What the node's replicas did meanwhile: the first tokens of their answers as gateways saw them, or where
none came through a gateway as their engines tell, and all their requests together."""
PLAIN_MEASURES = (*SERVING_MEASURES, *HOST_MEASURES)
"""One value in each row; those of cards have a list, in the order of `card_ordinals`."""


def _held(value: float) -> float:
    return 0.0 if abs(value) < _SMALLEST else value


class Gathered:
    """Samples of one measure."""

    __slots__ = ("count", "highest", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.highest: float | None = None

    def add(self, value: float | None) -> None:
        """Take a sample in; `None` is none, and neither is what no machine can have told."""
        if value is None or not abs(value) <= _LARGEST:
            return
        value = _held(value)
        self.count += 1
        self.total += value
        if self.highest is None or value > self.highest:
            self.highest = value

    def settle(self, kind: Kind) -> float | None:
        """What stands for all of them; `None` of none."""
        if not self.count:
            return None
        return self.total / self.count if kind == "mean" else self.highest


@dataclass(frozen=True, slots=True)
class NodeMinuteLoad:
    """One minute of one node."""

    plain: dict[str, float | None]
    """By the names of `PLAIN_MEASURES`."""
    card_ordinals: tuple[int, ...] = ()
    cards: dict[str, list[float | None]] = field(default_factory=dict)
    """By the names of `CARD_MEASURES`, for each card; without what no card tells."""


class NodeSamples:
    """What was seen of one node in the running minute."""

    def __init__(self) -> None:
        self._host = [Gathered() for _ in HOST_MEASURES]
        self._cards: dict[int, list[Gathered]] = {}
        self._running = Gathered()
        self._waiting = Gathered()
        self._ttfts: deque[float] = deque(maxlen=MOST_ANSWERS)
        self._engine_p50 = Gathered()
        self._engine_p99 = Gathered()

    def add_host(self, host: HostLoad) -> None:
        """Take in what the machine says of itself."""
        for gathered, measure in zip(self._host, HOST_MEASURES, strict=True):
            gathered.add(measure.read(host))

    def add_cards(self, cards: Iterable[CardLoad]) -> None:
        """Take in what its cards carry."""
        for card in cards:
            if not 0 <= card.ordinal < MOST_CARDS:
                continue
            kept = self._cards.get(card.ordinal)
            if kept is None:
                kept = self._cards[card.ordinal] = [Gathered() for _ in CARD_MEASURES]
            for gathered, measure in zip(kept, CARD_MEASURES, strict=True):
                gathered.add(measure.read(card))

    def add_requests(self, running: Collection[int | None], waiting: Collection[int | None]) -> None:
        """Take in the requests of its replicas; of engines that say nothing nothing is known."""
        for gathered, counts in ((self._running, running), (self._waiting, waiting)):
            known = [count for count in counts if count is not None]
            gathered.add(sum(known) if known else None)

    def add_answer(self, ttft_seconds: float) -> None:
        """Take in the first token of one answer."""
        if abs(ttft_seconds) <= _LARGEST:
            self._ttfts.append(_held(ttft_seconds))

    def add_engine_ttfts(self, p50: Iterable[float | None], p99: Iterable[float | None]) -> None:
        """Take in what engines say of their own first tokens: the middle replica's, and the worst one's."""
        self._engine_p50.add(quantile(sorted(value for value in p50 if value is not None), 0.50))
        self._engine_p99.add(max((value for value in p99 if value is not None), default=None))

    def summarise(self) -> NodeMinuteLoad:
        """What is kept of the minute."""
        ttfts = sorted(self._ttfts)
        plain = {
            "ttft_p50_seconds": quantile(ttfts, 0.50) if ttfts else self._engine_p50.settle("mean"),
            "ttft_p99_seconds": quantile(ttfts, 0.99) if ttfts else self._engine_p99.settle("most"),
            "requests_running": self._running.settle("mean"),
            "requests_waiting": self._waiting.settle("most"),
        }
        for gathered, measure in zip(self._host, HOST_MEASURES, strict=True):
            plain[measure.name] = gathered.settle(measure.kind)
        ordinals = tuple(sorted(self._cards))
        cards = {
            measure.name: [self._cards[ordinal][place].settle(measure.kind) for ordinal in ordinals]
            for place, measure in enumerate(CARD_MEASURES)
        }
        told = {name: values for name, values in cards.items() if _any_known(values)}
        return NodeMinuteLoad(plain, ordinals if told else (), told)


def _any_known(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)
