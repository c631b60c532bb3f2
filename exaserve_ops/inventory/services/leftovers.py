"""Having agents end processes that they left behind, and recording what became of it."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.inventory.domain.leftovers import EndWish, parse_end_wish
from exaserve_ops.inventory.domain.liveness import ALIVE
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.hints import ring


@transaction.atomic
def ask_process_end(
    node_id: UUID, *, pid: int, start_ticks: int, reason: str, actor: str, now: datetime
) -> None:
    """Ask a node's agent to end a process. It looks for itself whether that process is its own.

    Raises `ConflictError` where the node is not alive, or did not report the process as left over.
    """
    node = Node.objects.select_for_update().get(pk=node_id)
    known = [p for p in node.unknown_processes if (p.get("pid"), p.get("start_ticks")) == (pid, start_ticks)]
    if not known:
        raise ConflictError(f"node {node.name} reports no such process any more")
    if not known[0].get("left_over"):
        origin = known[0].get("origin") or "its agent does not tell whose it is"
        raise ConflictError(
            f"process {pid} is not provably left over by the agent ({origin}): end it by hand"
        )
    if node.liveness != ALIVE:
        raise ConflictError(f"node {node.name} is {node.liveness}: nobody there listens")
    wish = EndWish(str(node.pk), pid, start_ticks)
    told = f"process {pid} ({known[0].get('command') or 'no name'}): {reason}"
    record_event(_subject_of(node), "process_end_asked", actor=actor, now=now, reason=told)
    ring("end_process", wish.text())


@transaction.atomic
def record_process_end(wish: str, *, node_id: UUID, done: bool, reason: str, now: datetime) -> None:
    """Record what an agent says of such a wish; one for another node is passed over."""
    if parse_end_wish(wish).node_id != str(node_id):
        return
    node = Node.objects.get(pk=node_id)
    event = "process_ended" if done else "process_not_ended"
    record_event(_subject_of(node), event, actor=f"agent:{node}", now=now, reason=reason)


def _subject_of(node: Node) -> Subject:
    return Subject("node", str(node.pk), node.name)
