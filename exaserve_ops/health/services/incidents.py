"""Opening, growing and ending of incidents."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.health.domain.incident import INCIDENT, OPEN
from exaserve_ops.health.models import Incident
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.hints import ring
from exaserve_ops.lib.lifecycle import IllegalTransitionError


@transaction.atomic
def open_incident(
    kind: str,
    *,
    scope: str,
    node_ids: Iterable[UUID],
    evidence: str,
    freezes_healing: bool = True,
    actor: str,
    now: datetime,
) -> Incident:
    """Open an incident; one of the same kind and scope that is open already grows instead."""
    known = Incident.objects.select_for_update().filter(kind=kind, scope=scope, status=OPEN).first()
    if known is not None:
        return _grow(known, node_ids, evidence)
    incident = Incident.objects.create(
        kind=kind,
        scope=scope[:160],
        node_ids=sorted(node_ids),
        evidence=evidence,
        freezes_healing=freezes_healing,
        opened_at=now,
    )
    moved = ("", incident.status)
    record_event(subject_of(incident), "opened", actor=actor, now=now, moved=moved, reason=evidence)
    return incident


@transaction.atomic
def extend_incident(incident_id: UUID, *, node_ids: Iterable[UUID], evidence: str) -> Incident:
    """Add nodes that fell silent since to an open incident. One that has ended stays as it is."""
    incident = Incident.objects.select_for_update().get(pk=incident_id)
    return _grow(incident, node_ids, evidence) if incident.status == OPEN else incident


@transaction.atomic
def resolve_incident(incident_id: UUID, *, resolution: str, actor: str, now: datetime) -> Incident:
    """End an incident because reports came back. Raises `ConflictError` where it has ended."""
    return advance_incident(incident_id, "resolve", resolution=resolution, actor=actor, now=now)


@transaction.atomic
def confirm_incident(incident_id: UUID, *, reason: str, actor: str, now: datetime) -> Incident:
    """Say that the silent nodes are really dead: a controller writes it down within a second.

    Raises `ConflictError` where the incident has ended.
    """
    return advance_incident(incident_id, "confirm", resolution=reason, actor=actor, now=now)


@transaction.atomic
def dismiss_incident(incident_id: UUID, *, reason: str, actor: str, now: datetime) -> Incident:
    """Say that the silent nodes are not to be judged; healing of all others goes on.

    Raises `ConflictError` where the incident has ended.
    """
    return advance_incident(incident_id, "dismiss", resolution=reason, actor=actor, now=now)


@transaction.atomic
def mark_applied(incident_id: UUID, *, now: datetime) -> None:
    """Record that nothing is left to do for an incident that somebody decided."""
    Incident.objects.filter(pk=incident_id, applied_at=None).update(applied_at=now)


@transaction.atomic
def advance_incident(
    incident_id: UUID, event: str, *, resolution: str, actor: str, now: datetime
) -> Incident:
    """End an incident by an event: the only function that writes its status.

    Raises `ConflictError` where it has ended.
    """
    incident = Incident.objects.select_for_update().get(pk=incident_id)
    before = incident.status
    try:
        incident.status = INCIDENT.next(before, event)
    except IllegalTransitionError as error:
        raise ConflictError(f"this incident is {before} already") from error
    incident.resolved_at, incident.resolved_by, incident.resolution = now, actor[:120], resolution
    incident.save(update_fields=["status", "resolved_at", "resolved_by", "resolution"])
    record_event(
        subject_of(incident), event, actor=actor, now=now, moved=(before, incident.status), reason=resolution
    )
    # Healing that waited for this looks again.
    ring("deployment", "all")
    return incident


def subject_of(incident: Incident) -> Subject:
    """Return the audit subject of an incident."""
    return Subject("incident", str(incident.pk), str(incident))


def _grow(incident: Incident, node_ids: Iterable[UUID], evidence: str) -> Incident:
    incident.node_ids = sorted({*incident.node_ids, *node_ids})
    incident.evidence = evidence
    incident.save(update_fields=["node_ids", "evidence"])
    return incident
