"""The model that simulated replicas pretend to serve, and its deployment."""

from __future__ import annotations

from exaserve_ops.lib import clock
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.architecture import Architecture
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment, update_deployment
from exaserve_ops.serving.services.models import ModelFacts, register_model
from workers.simulation.node import ENGINE

ACTOR = "simulate"
MODEL = "simulated-8b"
DEPLOYMENT = "simulated"
REPLICA_BYTES = 40 << 30
"""Over half of a simulated tile: one replica on each, as on the machines that are modelled."""


def ensure_deployment(*, replicas: int, standbys: int = 0) -> str:
    """Have so many simulated replicas wanted, and standbys beside them; returns what was done, in words."""
    now = clock.now()
    known = Deployment.objects.filter(name=DEPLOYMENT).exclude(status=states.DELETED).first()
    if known is not None:
        update_deployment(known.pk, {"replicas": replicas, "standbys": standbys}, actor=ACTOR, now=now)
        return f"deployment '{DEPLOYMENT}' wants {replicas} replicas and {standbys} standbys"
    wish = DeploymentWish(
        name=DEPLOYMENT,
        model_id=_ensure_model().pk,
        replicas=replicas,
        standbys=standbys,
        engine=ENGINE,
        replica_memory_bytes=REPLICA_BYTES,
        drain_seconds=20,
    )
    create_deployment(wish, actor=ACTOR, now=now)
    return f"deployment '{DEPLOYMENT}' made, wants {replicas} replicas and {standbys} standbys"


def _ensure_model() -> Model:
    facts = ModelFacts(
        source="file:///simulated",
        files=(),
        architecture=Architecture(
            family="llama",
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocabulary=128_256,
            max_context_tokens=4_096,
            dtype="bfloat16",
        ),
        parameter_count=8_030_000_000,
    )
    return register_model(name=MODEL, facts=facts, actor=ACTOR, now=clock.now())
