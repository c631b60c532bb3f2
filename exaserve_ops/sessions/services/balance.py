"""Writing down which deployments' sessions are being balanced."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from exaserve_ops.audit.services import Happening, record_events
from exaserve_ops.serving.models import Deployment
from exaserve_ops.serving.services.deployments import subject_of

_NOTE_CHARACTERS = 300


@transaction.atomic
def record_balance(notes: Mapping[str, str], *, actor: str, now: datetime) -> None:
    """Record which deployments are being levelled, with what a plan says of each; all others are not.

    The record is what the next leader goes on from: levelling stops later than it starts, so a leader
    that did not know would stop in the middle. Where nothing changed, nothing is written.
    """
    concerned = Q(pk__in=[UUID(key) for key in notes]) | Q(balancing_since__isnull=False)
    happenings, changed = [], []
    for row in Deployment.objects.select_for_update().filter(concerned).order_by("pk"):
        note = notes.get(str(row.pk), "")[:_NOTE_CHARACTERS]
        if bool(note) != bool(row.balancing_since):
            event = "balancing" if note else "balanced"
            happenings.append(Happening(subject_of(row), event, ("", ""), note, row.generation))
            row.balancing_since = now if note else None
        if note != row.balancing_note:
            row.balancing_note = note
            changed.append(row)
    Deployment.objects.bulk_update(changed, ["balancing_since", "balancing_note"])
    record_events(happenings, actor=actor, now=now)
