"""What a deployment asks of accelerators, in words, and what its replicas have got."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from django.db.models import Count

from exaserve_ops.inventory.models import Accelerator
from exaserve_ops.serving.domain.accelerator_wish import WHOLE, AcceleratorWish
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.selectors.members import KNOWN_TO_AGENTS, live_members

_CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Got:
    """Accelerators of one sort that replicas of a deployment have."""

    words: str
    replicas: int
    accelerators: int
    is_spilled: bool = False
    """Whole cards of a deployment that asks for slices."""


def asked_words(wish: AcceleratorWish) -> str:
    """Such as `a slice 3g.40gb`, `a slice of 20,480 MiB or more`, `whole cards`."""
    if wish.wants_slice:
        least = f" of {wish.slice_memory_bytes >> 20:,} MiB or more" if wish.slice_memory_bytes else ""
        return f"a {wish.noun}{least}"
    return "whole cards" if wish.kind == WHOLE else "any"


def mps_words(wish: AcceleratorWish) -> str:
    """Such as `at most 25% of the threads, at most 4,096 MiB`; empty without an MPS share."""
    mps = wish.mps
    if mps is None:
        return ""
    parts = [f"at most {mps.thread_percent}% of the threads"] if mps.thread_percent else []
    parts += [f"at most {mps.memory_bytes >> 20:,} MiB"] if mps.memory_bytes else []
    return ", ".join(parts)


def got_by(deployment_id: UUID, wish: AcceleratorWish) -> tuple[Got, ...]:
    """What the live replicas of a deployment have, by sort; three queries."""
    links = Replica.accelerators.through.objects.filter(
        replica__deployment=deployment_id, replica__status__in=KNOWN_TO_AGENTS, replica__node_count=1
    )
    sort = ("accelerator__kind", "accelerator__profile", "accelerator__name", "accelerator__parent_uuid")
    rows = links.values_list(*sort).annotate(
        replicas=Count("replica", distinct=True), accelerators=Count("accelerator", distinct=True)
    )
    found: dict[tuple[str, bool], tuple[int, int]] = {}
    for kind, profile, name, parent, replicas, accelerators in rows.order_by(*sort):
        key = (_sort_words(kind, profile, name, is_slice=bool(parent)), wish.wants_slice and not parent)
        before = found.get(key, (0, 0))
        found[key] = (before[0] + replicas, before[1] + accelerators)
    for words, replicas, accelerators in _of_members(deployment_id):
        found[words, False] = (replicas, accelerators)
    return tuple(Got(words, *counts, is_spilled) for (words, is_spilled), counts in sorted(found.items()))


def _of_members(deployment_id: UUID) -> list[tuple[str, int, int]]:
    """What replicas over several nodes have, on all of them: in words, replicas, accelerators."""
    rows = live_members().filter(replica__deployment=deployment_id)
    held = {uuid: pk for pk, many in rows.values_list("replica", "accelerator_uuids") for uuid in many}
    by_sort: dict[str, list[str]] = {}
    for one in Accelerator.objects.filter(pk__in=held):
        words = _sort_words(one.kind, one.profile, one.name, is_slice=bool(one.parent_uuid))
        by_sort.setdefault(words, []).append(one.pk)
    return [(words, len({held[pk] for pk in pks}), len(pks)) for words, pks in by_sort.items()]


def _sort_words(kind: str, profile: str, name: str, *, is_slice: bool) -> str:
    if is_slice:
        return f"slice {profile}".strip()
    return "CPU" if kind == _CPU else f"whole card, {name or kind}"
