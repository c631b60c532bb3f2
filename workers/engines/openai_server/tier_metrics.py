"""The part of the metrics page that is about tiers of KV blocks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from workers.engines.kv_blocks import BlockUse
from workers.kv.tiers.ports import TierFacts


def block_families(prefix: str, blocks: BlockUse, facts: TierFacts | None) -> Iterator[Metric]:
    """Blocks of every tier by state, and how many it can hold."""
    by_state = GaugeMetricFamily(
        f"{prefix}_kv_blocks", "KV blocks by tier and state.", labels=["tier", "state"]
    )
    capacity = GaugeMetricFamily(
        f"{prefix}_kv_capacity_blocks", "KV blocks that a tier can hold.", labels=["tier"]
    )
    # The accelerator is where the engine computes, whichever device that is.
    for state in ("free", "used", "cached"):
        by_state.add_metric(["accelerator", state], getattr(blocks, state))
    capacity.add_metric(["accelerator"], blocks.total)
    for tier, use in (facts.uses if facts else {}).items():
        by_state.add_metric([tier, "free"], use.capacity_blocks - use.used_blocks)
        by_state.add_metric([tier, "cached"], use.used_blocks)
        capacity.add_metric([tier], use.capacity_blocks)
    yield by_state
    yield capacity


def swap_families(prefix: str, facts: TierFacts) -> Iterator[Metric]:
    """What moved, what went wrong, and whether swapping has stopped."""
    swapped = facts.swapped
    blocks = CounterMetricFamily(
        f"{prefix}_kv_swapped_blocks",
        "KV blocks moved between tiers, by the lower tier.",
        labels=["direction", "tier"],
    )
    moved = CounterMetricFamily(
        f"{prefix}_kv_swapped_bytes", "The same in bytes.", labels=["direction", "tier"]
    )
    for direction, by_tier in (("in", swapped.blocks_in), ("out", swapped.blocks_out)):
        for tier, count in by_tier.items():
            blocks.add_metric([direction, tier], count)
            moved.add_metric([direction, tier], count * facts.block_bytes)
    yield blocks
    yield moved
    yield CounterMetricFamily(
        f"{prefix}_kv_fetch_waits", "Requests that waited for blocks of a lower tier.", swapped.fetch_waits
    )
    yield CounterMetricFamily(
        f"{prefix}_kv_fetch_seconds", "How long fetches took, added up.", swapped.fetch_seconds
    )
    yield CounterMetricFamily(
        f"{prefix}_kv_checksum_failures", "Blocks on disk that were damaged.", swapped.checksum_failures
    )
    yield CounterMetricFamily(
        f"{prefix}_kv_dropped_blocks", "Cached blocks that no tier has any more.", swapped.dropped_blocks
    )
    yield CounterMetricFamily(f"{prefix}_kv_thrashes", "How often swapping stopped.", facts.thrash_starts)
    thrash = GaugeMetricFamily(
        f"{prefix}_kv_thrash", "1 while nothing is swapped and requests queue instead.", labels=["reason"]
    )
    thrash.add_metric([facts.thrash_reason], float(bool(facts.thrash_reason)))
    yield thrash
    off = GaugeMetricFamily(
        f"{prefix}_kv_tier_off", "1 for a tier that was asked for and is off.", labels=["tier", "reason"]
    )
    for tier, use in facts.uses.items():
        off.add_metric([tier, use.off_reason], float(bool(use.off_reason)))
    yield off
