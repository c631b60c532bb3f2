"""Changing what replicas may have of their node's KV pool, and recording what happened in pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

from django.db import transaction

from exaserve_ops.audit.services import Happening, Subject, record_event, record_events
from exaserve_ops.inventory.domain.liveness import ALIVE
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.lib.hints import ring
from exaserve_ops.serving.domain.kv_pools import LimitsWish, News, parse_limits_wish
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import subject_of

ASKED, SET, REFUSED = "kv_limits_asked", "kv_limits_set", "kv_limits_refused"


@transaction.atomic
def ask_kv_limits(
    node_id: UUID,
    replica_id: UUID,
    *,
    minimum_blocks: int,
    ceiling_blocks: int,
    reason: str,
    actor: str,
    now: datetime,
) -> None:
    """Ask a node's agent for other limits of a replica. It answers by its pool's rules.

    Raises `InvalidInputError` for limits that exclude one another, and `ConflictError` where the replica
    is not on that node, or the node is not alive.
    """
    if not 0 < minimum_blocks <= ceiling_blocks:
        raise InvalidInputError("minimum_blocks", f"Between 1 and the ceiling of {ceiling_blocks} blocks.")
    node = Node.objects.get(pk=node_id)
    replica = Replica.objects.select_for_update().filter(pk=replica_id, node=node_id).first()
    if replica is None:
        raise ConflictError(f"no such replica is on node {node.name}")
    if node.liveness != ALIVE:
        raise ConflictError(f"node {node.name} is {node.liveness}: nobody there listens")
    wish = LimitsWish(str(node_id), str(replica_id), minimum_blocks, ceiling_blocks)
    record_event(subject_of(replica), ASKED, actor=actor, now=now, reason=f"{wish.words()}: {reason}")
    ring("kv_limits", wish.text())


@transaction.atomic
def record_kv_limits(text: str, *, node_id: UUID, done: bool, reason: str, now: datetime) -> None:
    """Record what an agent says of such a wish; one for another node or replica is passed over."""
    wish = parse_limits_wish(text)
    replica = Replica.objects.filter(pk=wish.replica_id).first()
    if wish.node_id != str(node_id) or replica is None:
        return
    actor = f"agent:{Node.objects.get(pk=node_id)}"
    told = wish.words() if done else f"{wish.words()}: {reason}"
    record_event(subject_of(replica), SET if done else REFUSED, actor=actor, now=now, reason=told)


@transaction.atomic
def record_kv_news(news: Mapping[UUID, Sequence[News]], *, actor: str, now: datetime) -> None:
    """Record what is new in the pools of nodes; what concerns a replica that is gone is left out."""
    named = {r for each in news.values() for one in each for r in (one.replica_id, *one.about) if _is_id(r)}
    replicas = {str(row.pk): row for row in Replica.objects.filter(pk__in=named)}
    nodes = Node.objects.in_bulk(list(news))
    happenings = []
    for node_id, each in news.items():
        for one in each:
            subject = _subject(one, nodes.get(node_id), replicas)
            if subject is not None:
                happenings.append(Happening(subject, one.event, reason=_told(one, replicas)))
    record_events(happenings, actor=actor, now=now)


def _subject(one: News, node: Node | None, replicas: Mapping[str, Replica]) -> Subject | None:
    if not one.replica_id:
        return None if node is None else Subject("node", str(node.pk), node.name)
    replica = replicas.get(one.replica_id)
    return None if replica is None else subject_of(replica)


def _told(one: News, replicas: Mapping[str, Replica]) -> str:
    names = [replicas[r].name for r in one.about if r in replicas]
    return f"held by {', '.join(names)}: {one.reason}" if names else one.reason


def _is_id(text: str) -> bool:
    """Agents name replicas as the control plane does; whatever else one may say is nobody's."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True
