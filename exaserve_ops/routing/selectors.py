"""What gateways are told, out of the record."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Q

from exaserve_ops.access.models import Scope
from exaserve_ops.access.selectors import valid_keys
from exaserve_ops.inventory.domain.drain import NOT_DRAINED
from exaserve_ops.inventory.domain.liveness import ALIVE, SUSPECT
from exaserve_ops.routing.domain.records import KeyRecord, RouteRecord
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.reach import CLOSED, is_open
from exaserve_ops.serving.domain.trials import is_private
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.selectors.handover import ROUTED


def routes() -> dict[str, RouteRecord]:
    """Replicas that may be routed to, by id, in one query.

    A suspect node keeps its routes, marked as such: a late heartbeat is no reason to move a
    conversation. Standbys have none, once the conversations of one that has just stood down have left.
    """
    rows = (
        Replica.objects.filter(ROUTED, node__liveness__in=(ALIVE, SUSPECT))
        .exclude(address="")
        # Plain values: of ten thousand replicas, model instances would be most of the work.
        .values_list(
            *("pk", "address", "attempt", "generation"),
            *("status", "role", "reach", "sleep_state"),
            *("node_id", "node__name", "node__key_epoch", "node__liveness"),
            *("deployment__served_name", "deployment__name"),
            *("departure", "node__drain_status", "handed_over_at"),
        )
    )
    return {str(row[0]): _route(*row) for row in rows}


def served_models() -> frozenset[str]:
    """Names that clients may ask for."""
    wanted = Deployment.objects.filter(status=states.ACTIVE, replicas__gt=0)
    names = wanted.values_list("served_name", flat=True)
    return frozenset(name for name in names if not is_private(name))


def coming_models() -> frozenset[str]:
    """Names that a replica is on its way for: it starts, or is ready and nobody is sent to it yet."""
    on_its_way = Q(status__in=(states.STARTING, states.LOADING)) | (
        Q(status=states.READY) & (Q(reach__in=CLOSED) | ~Q(sleep_state=""))
    )
    rows = Replica.objects.filter(on_its_way, role=Replica.Role.SERVING, wanted=Replica.Wanted.RUN)
    names = rows.order_by().values_list("deployment__served_name", flat=True).distinct()
    return frozenset(name for name in names if not is_private(name))


def inference_keys(*, now: datetime) -> dict[str, KeyRecord]:
    """API keys that open the gateway, by the SHA-256 of their text."""
    keys = valid_keys(Scope.INFERENCE, now=now)
    return {
        key.sha256: KeyRecord(
            key_id=str(key.pk),
            name=key.name,
            max_concurrent_requests=key.max_concurrent_requests,
            tokens_per_minute=key.tokens_per_minute,
            traffic_class=key.traffic_class,
        )
        for key in keys
    }


def _route(
    pk: UUID,
    address: str,
    attempt: int,
    generation: int,
    *place: Any,  # noqa: ANN401 - columns of one row, in the query's order
) -> RouteRecord:
    status, role, reach, sleep_state, node_id, node_name, key_epoch, liveness, *more = place
    model, deployment, departure, drain, handed_over_at = more
    takes_new = status == states.READY and role == Replica.Role.SERVING
    host, _, port = address.rpartition(":")
    return RouteRecord(
        replica_id=str(pk),
        node_id=str(node_id),
        node_name=node_name,
        key_epoch=key_epoch,
        model=model,
        deployment=deployment,
        host=host.strip("[]"),
        port=int(port),
        attempt=attempt,
        generation=generation,
        accepts_new=takes_new,
        reached=is_open(reach, sleep_state),
        node_suspect=liveness == SUSPECT,
        is_left=bool(departure) or drain != NOT_DRAINED,
        keeps_sessions=not takes_new and handed_over_at is None,
        sleeps=bool(sleep_state),
    )
