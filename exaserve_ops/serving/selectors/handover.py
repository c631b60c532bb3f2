"""Which replicas hand their conversations over: those that are let go, and those that stand down."""

from __future__ import annotations

from django.db.models import Q

from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.models import Replica

_STANDS_DOWN = Q(role=Replica.Role.STANDBY, status=states.READY, drain_deadline_at__isnull=False)
HANDS_OVER = (Q(status=states.DRAINING) | _STANDS_DOWN) & Q(handed_over_at=None)
"""Of replicas: their own conversations are served there until they have left, and nobody new goes there."""
ROUTED = Q(status__in=(states.READY, states.DRAINING)) & (Q(role=Replica.Role.SERVING) | HANDS_OVER)
"""Of replicas: gateways know them. Standbys are in no table once their conversations have left."""


def hands_over(replica: Replica) -> bool:
    """Whether it is let go, and its conversations are served there until they have moved."""
    return replica.status == states.DRAINING and replica.handed_over_at is None


def stands_down(replica: Replica) -> bool:
    """Whether it stands by from now on, and its conversations are served there until they have moved."""
    is_standby = replica.role == Replica.Role.STANDBY and replica.status == states.READY
    return is_standby and replica.drain_deadline_at is not None and replica.handed_over_at is None
