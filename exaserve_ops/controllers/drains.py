"""Follows nodes that are emptied: says when one is empty, and has a deadline noticed when it passes."""

from __future__ import annotations

from collections.abc import Collection

from django.db.models import Count, Q

from exaserve_ops.controllers.loop import KeyQueue
from exaserve_ops.inventory.domain.drain import DRAINED, DRAINING
from exaserve_ops.inventory.domain.liveness import DEAD
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services.drain import record_drain_progress
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.selectors.members import on_node

ACTOR = "controller:drain"
# A dead node cannot say that what it was told to stop has ended; it will not serve again either.
_KEPT = tuple(status for status in states.REPLICA.live if status != states.STOPPING)


class DrainWatch:
    """What is let go, and in which order, is the deployments' plan; here is only looked on."""

    def __init__(self, queue: KeyQueue) -> None:
        self._queue = queue

    def step(self) -> None:
        """Look at every node that is being emptied, or was."""
        now = clock.now()
        nodes = Node.objects.filter(drain_status__in=(DRAINING, DRAINED)).annotate(
            live_count=Count("replicas", filter=_alone(states.REPLICA.live), distinct=True),
            kept_count=Count("replicas", filter=_alone(_KEPT), distinct=True),
            live_members=Count("replica_members", filter=_members(states.REPLICA.live), distinct=True),
            kept_members=Count("replica_members", filter=_members(_KEPT), distinct=True),
        )
        for node in nodes:
            dead = node.liveness == DEAD
            left = node.kept_count + node.kept_members if dead else node.live_count + node.live_members
            if (node.drain_status == DRAINING) != bool(left):
                record_drain_progress(node.pk, left=left, actor=ACTOR, now=now)
            elif left and node.drain_deadline_at is not None and node.drain_deadline_at <= now:
                self._hurry(node)

    def _hurry(self, node: Node) -> None:
        """The deadline is over: have the plans of everything that is left looked at now."""
        left = Replica.objects.filter(on_node(node.pk)).exclude(status__in=(states.STOPPED, states.STOPPING))
        for deployment_id in left.order_by().values_list("deployment", flat=True).distinct():
            self._queue.add("deployment", str(deployment_id))


def _alone(statuses: Collection[str]) -> Q:
    return Q(replicas__status__in=statuses, replicas__node_count=1)


def _members(statuses: Collection[str]) -> Q:
    """Parts of replicas over several nodes of which something may be left."""
    return Q(replica_members__replica__status__in=statuses, replica_members__ended_at=None)
