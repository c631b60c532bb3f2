"""A staged start in the database, at a moment of its course."""

from __future__ import annotations

from datetime import timedelta

from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Deployment, Replica, StagedStart
from exaserve_ops.serving.services.replicas import create_replicas
from tests.fakes.world import make_deployment, make_node


def make_staged_start(*, ready: int, starting: int, waiting: int) -> Deployment:
    """A deployment whose first wave is ready, and has been so for less than a minute; began a minute ago."""
    now = clock.now()
    began = now - timedelta(seconds=59)
    StagedStart.objects.create(began_at=began, most_waiting=waiting + starting)
    node = make_node("gpu-1")
    count = ready + starting + waiting
    deployment = make_deployment("staged", replicas=count)
    made = create_replicas(deployment.pk, count, why="test", actor="test", now=began)
    ids = [replica.pk for replica in made]
    rows = Replica.objects.filter(node=None, deployment=deployment)
    rows.filter(pk__in=ids[:ready]).update(
        node=node, status="ready", start_allowed_at=began, ready_at=now - timedelta(seconds=20)
    )
    rows.filter(pk__in=ids[ready : ready + starting]).update(
        node=node, status="loading", start_allowed_at=now - timedelta(seconds=20)
    )
    rows.filter(pk__in=ids[ready + starting :]).update(
        node=node,
        status="placed",
        start_waits_since=began,
        reason="waits its turn: 2 of 2 start on gpu-1",
    )
    return deployment
