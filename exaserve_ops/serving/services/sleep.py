"""Recording how standbys sleep."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from exaserve_ops.audit.services import Happening, Subject
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.observed import ObservedReplica
from exaserve_ops.serving.domain.sleep import ASLEEP, AWAKE, WAKING
from exaserve_ops.serving.models import Replica


def note_sleep(replica: Replica, seen: ObservedReplica, now: datetime) -> tuple[list[Happening], bool]:
    """Take over into a locked row how it sleeps; returns what happened by it, and whether it may be asked.

    The second is true where that changed: whoever routes has to look.
    """
    before, after = replica.sleep_state, seen.sleep_state
    said = replica.sleep_note
    replica.sleep_note = seen.sleep_note[:500]
    replica.woke_in_seconds = seen.woke_in_seconds
    happenings = []
    if replica.sleep_note and replica.sleep_note != said:
        happenings.append(_happened(replica, "kept_awake", replica.sleep_note))
    if before == after:
        return happenings, False
    replica.sleep_state, replica.sleep_since = after, now if after else None
    if after == ASLEEP:
        happenings.append(_happened(replica, "fell_asleep", ""))
    elif before == WAKING and after == AWAKE and seen.state == states.READY and seen.woke_in_seconds:
        happenings.append(_happened(replica, "woke", f"in {seen.woke_in_seconds:.1f} s"))
    return happenings, (before == AWAKE) != (after == AWAKE)


def nodes_of_awake_standbys(deployment_ids: Collection[UUID]) -> list[tuple[str, object]]:
    """Hints for the nodes whose awake standbys may sleep, or not, by what became of one that serves."""
    awake = Replica.objects.filter(
        deployment__in=deployment_ids,
        deployment__standbys_sleep=True,
        role=Replica.Role.STANDBY,
        wanted=Replica.Wanted.RUN,
        status=states.READY,
        sleep_state=AWAKE,
    )
    nodes = awake.exclude(node=None).order_by("node").values_list("node", flat=True).distinct()
    return [("node", node) for node in nodes]


def _happened(replica: Replica, event: str, reason: str) -> Happening:
    subject = Subject("replica", str(replica.pk), replica.name)
    return Happening(subject, event, reason=reason, generation=replica.generation)
