"""A replica over two nodes as it stands in the record, its second member just ended by a signal."""

from __future__ import annotations

from exaserve_ops.serving.domain.observed import ObservedExit, ObservedReplica
from exaserve_ops.serving.domain.placement import Placement, place_gang
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.selectors import deployment_snapshot, node_rooms
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment
from exaserve_ops.serving.services.gangs import settle_gang
from exaserve_ops.serving.services.observations import record_observations
from exaserve_ops.serving.services.replicas import create_replicas, place_replica
from tests.fakes.world import GIB, NOW, make_model, make_node


def make_gang_of_two() -> Replica:
    """On nodes `wide-0` and `wide-1` of supernode `s1`."""
    for name in ("wide-0", "wide-1"):
        make_node(name, rack="r9", supernode="s1")
    wish = DeploymentWish(
        name="wide", model_id=make_model("wide-model").pk, replicas=1, engine="simulated",
        replica_memory_bytes=GIB, nodes_per_replica=2,
    )  # fmt: skip
    deployment = create_deployment(wish, actor="test", now=NOW)
    [replica] = create_replicas(deployment.pk, 1, why="1 of 1", actor="test", now=NOW)
    snapshot = deployment_snapshot(deployment.pk, active_sessions={}, now=NOW)
    assert snapshot is not None
    placement = place_gang(snapshot.request, node_rooms(deployment.pk, now=NOW))
    assert isinstance(placement, Placement), placement
    place_replica(replica.pk, placement, actor="test", now=NOW)
    Replica.objects.filter(pk=replica.pk).update(start_waits_since=None, start_allowed_at=NOW)
    assert settle_gang(replica.pk, actor="test", now=NOW) is not None
    replica.refresh_from_db()
    for member in replica.members.all():
        ended = ObservedExit(1, None, 9, 4.0, ("last words", "bye <b>")) if member.number else None
        seen = ObservedReplica(
            str(replica.pk), replica.generation, "failed" if ended else "loading", 1,
            pid=None if ended else 77, address="" if ended else "10.0.0.1:4000",
            last_exit=ended, member_number=member.number, epoch=1,
            reason="its part of start 1 ended" if ended else "", rendezvous="" if ended else "10.0.0.1:4001",
        )  # fmt: skip
        record_observations([seen], node_id=member.node_id, actor="agent", now=NOW)
    assert settle_gang(replica.pk, actor="test", now=NOW) is not None
    replica.refresh_from_db()
    return replica
