"""What gateways are told, out of the record."""

from __future__ import annotations

from datetime import datetime

from exaserve_ops.access.models import Scope
from exaserve_ops.access.selectors import valid_keys
from exaserve_ops.inventory.domain.liveness import ALIVE, SUSPECT
from exaserve_ops.routing.domain.records import KeyRecord, RouteRecord
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.models import Deployment, Replica

_ROUTED = (states.READY, states.DRAINING)


def routes() -> dict[str, RouteRecord]:
    """Replicas that may be routed to, by id, in one query.

    A suspect node keeps its routes: one late heartbeat is no reason to move a conversation. Standbys
    have none.
    """
    rows = (
        Replica.objects.filter(
            status__in=_ROUTED, role=Replica.Role.SERVING, node__liveness__in=(ALIVE, SUSPECT)
        )
        .exclude(address="")
        .select_related("node", "deployment")
    )
    return {str(replica.pk): _route(replica) for replica in rows}


def served_models() -> frozenset[str]:
    """Names that clients may ask for."""
    rows = Deployment.objects.filter(status=states.ACTIVE).values_list("served_name", flat=True)
    return frozenset(rows)


def inference_keys(*, now: datetime) -> dict[str, KeyRecord]:
    """API keys that open the gateway, by the SHA-256 of their text."""
    keys = valid_keys(Scope.INFERENCE, now=now)
    return {key.sha256: KeyRecord(key_id=str(key.pk), name=key.name) for key in keys}


def _route(replica: Replica) -> RouteRecord:
    if replica.node is None:  # the query joins the node
        raise AssertionError(replica.pk)
    host, _, port = replica.address.rpartition(":")
    return RouteRecord(
        replica_id=str(replica.pk),
        node_id=str(replica.node.pk),
        node_name=replica.node.name,
        key_epoch=replica.node.key_epoch,
        model=replica.deployment.served_name,
        deployment=replica.deployment.name,
        host=host.strip("[]"),
        port=int(port),
        attempt=replica.attempt,
        generation=replica.generation,
        accepts_new=replica.status == states.READY,
    )
