"""The models that simulated replicas pretend to serve, and their deployment."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from blake3 import blake3

from exaserve_ops.lib import clock
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.architecture import Architecture
from exaserve_ops.serving.domain.manifest import EncodedManifest, FileEntry
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment, update_deployment
from exaserve_ops.serving.services.models import ModelFacts, register_model
from exaserve_ops.serving.services.weights import change_storage
from workers.protocol import manifest as manifests
from workers.simulation.identity import ENGINE

ACTOR = "simulate"
MODEL = "simulated-8b"
DEPLOYMENT = "simulated"
SHARD_BYTES = 5 * 10**9
_ARCHITECTURE = Architecture(
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128_256,
    max_context_tokens=4_096,
    dtype="bfloat16",
)
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


def ensure_stored_models(gigabytes: Sequence[int]) -> str:
    """Have a simulated model of each size that nodes keep on their disks; returns what they are called.

    Its manifest names pieces of nothing: simulated nodes need no more, and no real one can fetch it.
    """
    names = [_ensure_stored_model(size) for size in gigabytes]
    return f"simulated models with weights on nodes' disks: {', '.join(names)}"


def facts_of_stored_model(gigabytes: int) -> ModelFacts:
    """What a simulated model of that size is made of."""
    name = f"simulated-weights-{gigabytes}gb"
    files = _files_of(name, gigabytes * 10**9)
    revision = manifests.revision_of(files)
    digest, body = manifests.encode(manifests.Manifest(revision, manifests.PIECE_BYTES, files))
    return ModelFacts(
        source=f"file:///{name}",
        files=tuple(FileEntry(file.path, file.size_bytes, file.sha256) for file in files),
        architecture=_ARCHITECTURE,
        parameter_count=gigabytes * 10**9 // 2,
        manifest=EncodedManifest(digest, body),
    )


def _ensure_stored_model(gigabytes: int) -> str:
    name = f"simulated-weights-{gigabytes}gb"
    known = Model.objects.filter(name=name).exists()
    model = register_model(name=name, facts=facts_of_stored_model(gigabytes), actor=ACTOR, now=clock.now())
    if not known:
        reason = "simulated nodes keep it on their disks"
        change_storage(
            model.pk, storage=Model.Storage.NODE, origins=(), actor=ACTOR, now=clock.now(), reason=reason
        )
    return name


def _files_of(name: str, total_bytes: int) -> tuple[manifests.ManifestFile, ...]:
    """Shards with digests that are made up, the same each time."""
    sizes = [min(SHARD_BYTES, total_bytes - start) for start in range(0, total_bytes, SHARD_BYTES)]
    return tuple(
        manifests.ManifestFile(
            path=f"model-{number:05d}-of-{len(sizes):05d}.safetensors",
            size_bytes=size,
            sha256=hashlib.sha256(f"{name}/{number}".encode()).hexdigest(),
            pieces=b"".join(
                blake3(f"{name}/{number}/{piece}".encode()).digest()
                for piece in range(-(-size // manifests.PIECE_BYTES))
            ),
        )
        for number, size in enumerate(sizes, 1)
    )


def _ensure_model() -> Model:
    facts = ModelFacts(
        source="file:///simulated",
        files=(),
        architecture=_ARCHITECTURE,
        parameter_count=8_030_000_000,
    )
    return register_model(name=MODEL, facts=facts, actor=ACTOR, now=clock.now())
