"""Writing to the inventory: enrolling, cordoning, and what agents say about their nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.db import connection, transaction
from django.db.models import ProtectedError

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.inventory.domain.addresses import address_problem
from exaserve_ops.inventory.domain.drain import NOT_DRAINED
from exaserve_ops.inventory.domain.facts import NodeFacts
from exaserve_ops.inventory.domain.liveness import NODE_LIVENESS
from exaserve_ops.inventory.models import FailureDomain, Node
from exaserve_ops.inventory.services.hardware import record_hardware
from exaserve_ops.inventory.services.joining import create_join_token as create_join_token
from exaserve_ops.inventory.services.joining import enrol_node as enrol_node
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.hints import ring

_TOLD = (
    *("hostname", "address", "agent_version", "boot_id", "cpu_count", "memory_bytes"),
    *("engines", "engine_versions", "labels", "simulated", "mps_ready", "mps_note"),
    "protocol_minor",
)
"""What a Hello says of the node itself, under the same names as in the record."""
_RECORD_SIGHTINGS = """
UPDATE inventory_node AS node SET last_report_at = seen.at, clock_skew_seconds = seen.skew
FROM unnest(%s::uuid[], %s::timestamptz[], %s::float8[]) AS seen (id, at, skew) WHERE node.id = seen.id
"""
"""Arrays, and not a CASE for each node: it is run every few seconds for all of them."""


@transaction.atomic
def record_hello(node_id: UUID, facts: NodeFacts, *, now: datetime) -> Node:
    """Take over what an agent says about its node. History stays; what is known already is not written."""
    node = Node.objects.select_for_update().get(pk=node_id)
    previous, restarted = node.address, node.boot_id != facts.boot_id
    problem = _address_problem(facts)
    if problem:
        facts = replace(facts, address=node.address)
    changed = _take_over(node, facts)
    if node.address_problem != problem:
        node.address_problem = problem
        changed.add("address_problem")
    if changed or node.last_report_at is None:
        node.last_report_at = now
        node.save(update_fields=[*changed, "last_report_at"])
    if "labels" in changed or node.failure_domain.parent_id is None:
        _place_in_domains(node)
    changed |= record_hardware(node, facts, now=now)
    _tell(node, changed, previous_address=previous, restarted=restarted, now=now)
    if changed:
        ring("node", node.pk)
    return node


@transaction.atomic
def advance_liveness(node_id: UUID, event: str, *, reason: str, actor: str, now: datetime) -> Node:
    """Move a node's liveness by an event, under its row lock. Raises `IllegalTransitionError`."""
    node = Node.objects.select_for_update().get(pk=node_id)
    before = node.liveness
    node.liveness = NODE_LIVENESS.next(before, event)
    node.liveness_reason = reason[:500]
    node.liveness_changed_at = now
    node.save(update_fields=["liveness", "liveness_reason", "liveness_changed_at"])
    record_event(
        subject_of(node),
        event,
        actor=actor,
        now=now,
        moved=(before, node.liveness),
        reason=reason,
    )
    ring("node", node.pk)
    return node


@transaction.atomic
def cordon_node(node_id: UUID, *, reason: str, actor: str, now: datetime) -> Node:
    """Place nothing new on a node; what runs there stays. Twice is harmless."""
    return _set_cordon(node_id, cordoned=True, reason=reason, actor=actor, now=now)


@transaction.atomic
def uncordon_node(node_id: UUID, *, actor: str, now: datetime) -> Node:
    """Let a node take new replicas again. Twice is harmless."""
    return _set_cordon(node_id, cordoned=False, reason="", actor=actor, now=now)


@transaction.atomic
def revoke_node_keys(node_id: UUID, *, actor: str, now: datetime) -> Node:
    """Make every key of a node worthless: its reports are refused and its commands not understood.

    The node falls silent to us and is declared dead. Its agent must join again as a new node.
    """
    node = Node.objects.select_for_update().get(pk=node_id)
    node.key_epoch += 1
    node.save(update_fields=["key_epoch"])
    reason = f"key epoch {node.key_epoch}"
    record_event(subject_of(node), "keys_revoked", actor=actor, now=now, reason=reason)
    ring("node", node.pk)
    return node


@transaction.atomic
def delete_node(node_id: UUID, *, actor: str, now: datetime) -> None:
    """Forget a node that no replica was ever placed on, its accelerators and lease included.

    Raises `ConflictError` where replicas point to it: they are history that must stay readable.
    """
    node = Node.objects.select_for_update().get(pk=node_id)
    subject = subject_of(node)
    try:
        with transaction.atomic():
            node.delete()
    except ProtectedError as error:
        raise ConflictError(f"node {subject.name} has replicas, past ones included; cordon it") from error
    record_event(subject, "deleted", actor=actor, now=now)
    ring("node", node_id)


@transaction.atomic
def record_degradation(
    node_id: UUID,
    *,
    reason: str,
    commands_stale_since: datetime | None,
    reconcile_stale_since: datetime | None,
    unknown_processes: Sequence[Mapping[str, object]],
    now: datetime,
) -> None:
    """Record which part of an agent stands still while its heartbeats arrive; empty clears it."""
    node = Node.objects.select_for_update().get(pk=node_id)
    changed = node.degraded_reason != reason
    node.degraded_reason = reason[:500]
    node.commands_stale_since = commands_stale_since
    node.reconcile_stale_since = reconcile_stale_since
    node.unknown_processes = [dict(process) for process in unknown_processes]
    node.save(
        update_fields=[
            "degraded_reason",
            "commands_stale_since",
            "reconcile_stale_since",
            "unknown_processes",
        ]
    )
    if changed:
        event = "degraded" if reason else "healthy_again"
        record_event(subject_of(node), event, actor=f"agent:{node}", now=now, reason=reason)


def record_sightings(seen: Mapping[UUID, tuple[datetime, float | None]]) -> None:
    """Write down, in one statement, when each node last reported and how its clock is off."""
    moments, skews = zip(*seen.values(), strict=True)
    with connection.cursor() as cursor:
        cursor.execute(_RECORD_SIGHTINGS, [list(seen), list(moments), list(skews)])


def subject_of(node: Node) -> Subject:
    """Return the audit subject of a node."""
    return Subject("node", str(node.pk), node.name)


def _set_cordon(node_id: UUID, *, cordoned: bool, reason: str, actor: str, now: datetime) -> Node:
    node = Node.objects.select_for_update().get(pk=node_id)
    if not cordoned and node.drain_status != NOT_DRAINED:
        raise ConflictError(f"node {node.name} is {node.drain_status}; undrain it, and it is uncordoned too")
    if node.cordoned == cordoned and node.cordon_reason == reason:
        return node
    node.cordoned, node.cordon_reason = cordoned, reason[:500]
    node.save(update_fields=["cordoned", "cordon_reason"])
    event = "cordoned" if cordoned else "uncordoned"
    record_event(subject_of(node), event, actor=actor, now=now, reason=reason)
    ring("node", node.pk)
    return node


def _tell(node: Node, changed: set[str], *, previous_address: str, restarted: bool, now: datetime) -> None:
    """Leave an event of each change that people ask about."""
    told = []
    if "address" in changed and previous_address:
        told.append(("moved", f"address changed from {previous_address} to {node.address}"))
    if "address_problem" in changed and node.address_problem:
        told.append(("address_refused", node.address_problem))
    if restarted:
        told.append(("said_hello", f"agent {node.agent_version} started"))
    for event, reason in told:
        record_event(subject_of(node), event, actor=f"agent:{node}", now=now, reason=reason)


def _address_problem(facts: NodeFacts) -> str:
    """What is wrong with the address that an agent gives; nobody is sent to a simulated one."""
    if facts.simulated:
        return ""
    return address_problem(facts.address, allow_local=settings.ENV.allow_local_addresses)[:500]


def _take_over(node: Node, facts: NodeFacts) -> set[str]:
    """Set what differs; returns the names of the fields."""
    changed = set()
    for name in _TOLD:
        value = getattr(facts, name)
        value = list(value) if isinstance(value, tuple) else dict(value) if name == "labels" else value
        if getattr(node, name) != value:
            setattr(node, name, value)
            changed.add(name)
    return changed


def _place_in_domains(node: Node) -> None:
    """Hang the node's host under the rack and supernode that its labels name."""
    parent: FailureDomain | None = None
    for kind in (FailureDomain.Kind.SUPERNODE, FailureDomain.Kind.RACK):
        name = node.labels.get(kind.value)
        if name:
            defaults = {"parent": parent}
            above = parent
            parent, _ = FailureDomain.objects.get_or_create(kind=kind, name=name, defaults=defaults)
            if above is not None and parent.parent != above:
                # Its nodes say now what they belong to, or that they were moved.
                parent.parent = above
                parent.save(update_fields=["parent"])
    host = node.failure_domain
    if host.parent != parent:
        host.parent = parent
        host.save(update_fields=["parent"])
