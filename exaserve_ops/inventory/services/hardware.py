"""What agents say of accelerators and their links: recorded where it differs from the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any

from exaserve_ops.inventory.domain.facts import AcceleratorFacts, NodeFacts
from exaserve_ops.inventory.models import Accelerator, Node, NodeHardware

_FACTS = tuple(field.name for field in fields(AcceleratorFacts))


def record_hardware(node: Node, facts: NodeFacts, *, now: datetime) -> set[str]:
    """Bring accelerators, links and probe notes up to date. Returns what changed.

    Accelerators are replaced whole; one that replicas still point to stays as history of theirs.
    """
    changed = set()
    if _replace_accelerators(node, facts.accelerators):
        changed.add("accelerators")
    topology = None if facts.topology is None else asdict(facts.topology)
    topology = None if topology is None else {key: list(rows) for key, rows in topology.items()}
    notes = list(facts.probe_notes)
    known = NodeHardware.objects.filter(pk=node.pk).values_list("topology", "probe_notes").first()
    if (known or (None, [])) != (topology, notes):
        told: dict[str, Any] = {"topology": topology, "probe_notes": notes, "recorded_at": now}
        NodeHardware.objects.update_or_create(node=node, defaults=told)
        changed.add("hardware")
    return changed


def _of_parts(node: Node) -> set[str]:
    """Accelerators that parts of replicas over several nodes have, or had."""
    rows = Node.objects.filter(pk=node.pk).exclude(replica_members=None)
    return {
        uuid for uuids in rows.values_list("replica_members__accelerator_uuids", flat=True) for uuid in uuids
    }


def _replace_accelerators(node: Node, facts: Sequence[AcceleratorFacts]) -> bool:
    """Whether anything had to be written."""
    known = {row["uuid"]: row for row in node.accelerators.values(*_FACTS)}
    wanted = {fact.uuid: asdict(fact) | {"unreadable": list(fact.unreadable)} for fact in facts}
    gone = known.keys() - wanted.keys()
    if gone:
        gone -= _of_parts(node)
    removed = gone and node.accelerators.filter(pk__in=gone, replicas__isnull=True).delete()[0]
    different = [row for uuid, row in wanted.items() if known.get(uuid) != row]
    if different:
        Accelerator.objects.bulk_create(
            [Accelerator(node=node, **row) for row in different],
            update_conflicts=True,
            unique_fields=["uuid"],
            update_fields=["node", *(name for name in _FACTS if name != "uuid")],
        )
    return bool(removed or different)
