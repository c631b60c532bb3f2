"""What a node's page says of its machine: rows of lines over one time axis, and each card now. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from exaserve_ops.telemetry.domain.node_history import Line, NodeHistory

RANGES = {
    "1h": ("1 h", timedelta(hours=1), timedelta(minutes=1)),
    "6h": ("6 h", timedelta(hours=6), timedelta(minutes=2)),
    "24h": ("24 h", timedelta(hours=24), timedelta(minutes=10)),
}
"""By their names in addresses: words, how far back, and the step between two points."""
DEFAULT_RANGE = "1h"
LINK_FULL_RATIO = 0.8
"""From here on a link is what a stream waits for: bursts within a second already fill it."""
CORE_FULL_RATIO = 0.7
"""A scheduler is one thread: where the busiest core is busier on average, it is late again and again."""
_WORTH_SHOWING_RATIO = 0.01
POWER_CAP = "power cap"
"""As agents say it among what holds a card back."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row: which measures it shows, and how."""

    title: str
    unit: str
    measures: tuple[tuple[str, str], ...]
    """Each with the word beside its line; cards are named by their numbers."""
    hint: str = ""
    top: float | None = None
    """Of the scale, where it is fixed."""
    threshold: float | None = None
    instead_of: str = ""
    """Shown where this measure, which says more, is not told."""
    quiet_below: float | None = None
    """Left out while nothing in it is above."""
    what: str = ""
    """What is said to be missing where nobody tells; empty: nothing is said."""
    of_cards: bool = False


_PLANS = (
    RowPlan(
        "TTFT", "seconds", (("ttft_p50_seconds", "p50"), ("ttft_p99_seconds", "p99")),
        hint="Until the first token of its replicas' answers, as gateways saw it; else as its engines tell.",
    ),
    RowPlan(
        "Requests", "requests", (("requests_waiting", "waiting"), ("requests_running", "running")),
        hint="Of all its replicas: the most that waited at once, and how many ran.",
    ),
    RowPlan(
        "Cards in use", "ratio", (("card_used_ratio", ""),), top=1.0, of_cards=True,
        what="use of cards",
        hint="Share of the time in which anything ran on the card; it does not say how much of it was busy.",
    ),
    RowPlan("Their memory", "ratio", (("card_memory_ratio", ""),), top=1.0, of_cards=True),
    RowPlan(
        "PCIe", "ratio", (("card_pcie_ratio", ""),), top=1.0, threshold=LINK_FULL_RATIO, of_cards=True,
        hint="Of what each card's lanes carry one way, in the direction with more on it.",
    ),
    RowPlan(
        "PCIe", "bytes_per_second", (("card_pcie_bytes_per_second", ""),), instead_of="card_pcie_ratio",
        what="PCIe", of_cards=True, hint="Both directions of each card; the link's speed is not told.",
    ),
    RowPlan(
        "NVLink", "ratio", (("card_nvlink_ratio", ""),), top=1.0, threshold=LINK_FULL_RATIO, of_cards=True,
        hint="Of what all links of a card that are up carry one way, in the direction with more on it.",
    ),
    RowPlan(
        "NVLink", "bytes_per_second", (("card_nvlink_bytes_per_second", ""),), instead_of="card_nvlink_ratio",
        what="NVLink", of_cards=True, hint="Both directions of each card; their speed is not told.",
    ),
    RowPlan("Power", "watts", (("card_power_watts", ""),), of_cards=True),
    RowPlan("Temperature", "celsius", (("card_temperature_celsius", ""),), of_cards=True),
    RowPlan(
        "Held back", "ratio", (("card_held_back_ratio", ""),), top=1.0, quiet_below=_WORTH_SHOWING_RATIO,
        hint="Share of the time in which heat or the power cap kept a card's clocks low.", of_cards=True,
    ),
    RowPlan(
        "Network", "ratio", (("network_used_ratio", ""),), top=1.0, threshold=LINK_FULL_RATIO,
        hint="Of what the fullest interface carries one way, in the direction with more on it.",
    ),
    RowPlan(
        "Network", "bytes_per_second",
        (("network_receive_bytes_per_second", "in"), ("network_send_bytes_per_second", "out")),
        instead_of="network_used_ratio", what="network",
        hint="All interfaces; how fast they are is not told.",
    ),
    RowPlan(
        "RDMA", "ratio", (("rdma_used_ratio", ""),), top=1.0, threshold=LINK_FULL_RATIO,
        hint="Of what the fullest port carries one way. These bytes pass the host's network by.",
    ),
    RowPlan(
        "RDMA", "bytes_per_second",
        (("rdma_receive_bytes_per_second", "in"), ("rdma_send_bytes_per_second", "out")),
        instead_of="rdma_used_ratio", hint="All ports; how fast they are is not told.",
    ),
    RowPlan(
        "Disks", "bytes_per_second",
        (("disk_read_bytes_per_second", "read"), ("disk_write_bytes_per_second", "written")), what="disks",
    ),
    RowPlan(
        "Processor", "ratio", (("cpu_busiest_ratio", "busiest core"), ("cpu_used_ratio", "all cores")),
        top=1.0, threshold=CORE_FULL_RATIO, what="processor",
        hint="An engine's scheduler is one thread: the busiest core can be full while the others idle.",
    ),
    RowPlan(
        "Memory", "ratio", (("memory_used_ratio", ""),), top=1.0,
    ),
    RowPlan(
        "Stalled", "ratio",
        (
            ("io_stalled_ratio", "disks"), ("memory_stalled_ratio", "memory"),
            ("cpu_stalled_ratio", "processor"),
        ),
        top=1.0, quiet_below=_WORTH_SHOWING_RATIO,
        hint="Share of ten seconds in which some task stood still for want of it.",
    ),
)  # fmt: skip


def machine_rows(history: NodeHistory, *, has_cards: bool, has_nvlink: bool | None) -> dict[str, Any]:
    """Rows over one time axis as JSON has them, and in words what nobody tells of.

    `has_nvlink`: whether any card has links; `None` where nobody told.
    """
    lines: dict[str, list[Line]] = {}
    for line in history.lines:
        lines.setdefault(line.measure.name, []).append(line)
    rows = [row for plan in _PLANS if (row := _row(plan, lines)) is not None]
    return {
        "at": [moment.isoformat() for moment in history.at],
        "step_seconds": history.step.total_seconds(),
        "rows": rows,
        "missing": _missing(lines, has_cards=has_cards, has_nvlink=has_nvlink) if lines else "",
    }


def _row(plan: RowPlan, lines: Mapping[str, Sequence[Line]]) -> dict[str, Any] | None:
    if plan.instead_of in lines:
        return None
    found = [(word, line) for name, word in plan.measures for line in lines.get(name, ())]
    peak = max((value for _, line in found for value in line.values if value is not None), default=None)
    if peak is None or (plan.quiet_below is not None and peak <= plan.quiet_below):
        return None
    return {
        "title": plan.title,
        "unit": plan.unit,
        "hint": plan.hint,
        "top": plan.top,
        "threshold": plan.threshold,
        "of_cards": plan.of_cards,
        "lines": [
            {
                "name": word if line.accelerator is None else f"card {line.accelerator}",
                "values": list(line.values),
            }
            for word, line in found
        ],
    }


def _missing(lines: Mapping[str, Sequence[Line]], *, has_cards: bool, has_nvlink: bool | None) -> str:
    """One sentence for all, so that no empty row has to say it."""
    unsaid = [
        plan.what
        for plan in _PLANS
        if plan.what
        and not any(name in lines for name in (*(name for name, _ in plan.measures), plan.instead_of))
        and (has_cards or not plan.of_cards)
        and not (plan.what == "NVLink" and has_nvlink is False)
    ]
    said = ["No card here has NVLink."] if has_cards and has_nvlink is False else []
    if unsaid:
        said.append(f"Nobody on this node told of {', '.join(unsaid)} in this time.")
    return " ".join(said)


@dataclass(frozen=True, slots=True)
class CardNow:
    """One card's load as a table shows it."""

    load: Mapping[str, Any]
    memory_ratio: float | None
    is_capped: bool
    """Its power is at the limit that it may take."""
    warnings: tuple[str, ...]


def cards_now(loads: Sequence[Mapping[str, Any]]) -> tuple[CardNow, ...]:
    """Each card with what is wrong with it, in words."""
    return tuple(
        CardNow(
            load,
            load["memory_used_bytes"] / load["memory_total_bytes"]
            if load["memory_used_bytes"] is not None and load["memory_total_bytes"]
            else None,
            POWER_CAP in (load["held_back_by"] or ()),
            card_warnings(load),
        )
        for load in loads
    )


def card_warnings(load: Mapping[str, Any]) -> tuple[str, ...]:
    """What somebody should look at.

    That is neither a card at its power cap, which works as it is meant to, nor packets that PCIe sent anew,
    of which a few are normal.
    """
    said = [f"held back by {reason}" for reason in load["held_back_by"] or () if reason != POWER_CAP]
    up, links = load["nvlinks_up"], load["nvlinks"]
    if links and up is not None and up < links:
        said.append(f"{links - up} of {links} NVLinks are down")
    for count, words in (
        (load["ecc_uncorrected"], "memory errors that could not be corrected"),
        (load["nvlink_errors"], "errors on NVLink"),
    ):
        if count:
            said.append(f"{words}: {count:,}")
    if load["last_xid"]:
        said.append(f"last error of its driver: XID {load['last_xid']}")
    return (*said, *load["notes"])


def has_nvlink(loads: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether any card has links; `None` where nobody told."""
    told = [load["nvlinks"] for load in loads if load["nvlinks"] is not None]
    return any(told) if told else None
