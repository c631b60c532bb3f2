"""What weights nodes are to have, by models, replicas and claims; and which nodes have a model's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from uuid import UUID

from django.db.models import Max, Sum

from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.serving.models import Model, ModelManifest, Replica
from exaserve_ops.serving.selectors.rooms import KNOWN_TO_AGENTS
from exaserve_ops.weights.domain.held import READY, WeightsOnNode
from exaserve_ops.weights.domain.wanted import REPLICA, Claim, Origin, Revision, WantedWeights, combine_claims
from exaserve_ops.weights.selectors import claims_by_node, weights_on

FOLDER = "folder"


def model_weights_on(model_id: UUID, node_ids: Collection[UUID]) -> dict[UUID, WeightsOnNode]:
    """Whether a replica of this model could start on each of these nodes now, and if not, why not.

    `ready` of a model that is used in place says only that nothing has to be fetched for it.
    """
    model = Model.objects.only("digest", "storage", "weights_bytes").get(pk=model_id)
    if model.storage == Model.Storage.IN_PLACE:
        in_place = WeightsOnNode(
            READY, "used where its source lies", model.weights_bytes, model.weights_bytes
        )
        return dict.fromkeys(node_ids, in_place)
    return weights_on(model.digest, node_ids)


def origins_of(model: Model) -> tuple[Origin, ...]:
    """Where nodes fetch a model, nearest first."""
    told = tuple(
        Origin(str(place["kind"]), str(place["location"]), str(place.get("secret", "")))
        for place in model.origins
    )
    return told or (Origin(FOLDER, model.source),)


def known_revisions() -> dict[str, Revision]:
    """Every revision that has a manifest, with the places of all models of these bytes."""
    rows = (
        Model.objects.filter(manifest__isnull=False)
        .annotate(total_bytes=Sum("files__size_bytes"), manifest_digest=Max("manifest__digest"))
        .only("name", "digest", "source", "origins")
        .order_by("name")
    )
    found: dict[str, Revision] = {}
    for model in rows:
        before = found.get(model.digest)
        origins = dict.fromkeys((*(before.origins if before else ()), *origins_of(model)))
        found[model.digest] = Revision(
            digest=model.digest,
            manifest_digest=model.manifest_digest,
            total_bytes=model.total_bytes,
            name=before.name if before else model.name,
            origins=tuple(origins),
        )
    return found


def manifest_body(digest: str) -> bytes:
    """Bytes of a manifest. Raises `ModelManifest.DoesNotExist`."""
    row = ModelManifest.objects.filter(digest=digest).first()
    if row is None:
        raise ModelManifest.DoesNotExist(f"no manifest {digest}")
    return bytes(row.body)


def wanted_by_node(revisions: Mapping[str, Revision]) -> dict[str, tuple[WantedWeights, ...]]:
    """What each node in service is to have on its disk, in three queries."""
    claims = claims_by_node()
    rows = (
        Replica.objects.filter(
            status__in=KNOWN_TO_AGENTS, node__isnull=False, release__model__storage=Model.Storage.NODE
        )
        .values_list("node_id", "release__model__digest")
        .order_by()
        .distinct()
    )
    for node_id, digest in rows:
        claims.setdefault(str(node_id), []).append(Claim(digest, REPLICA))
    nodes = map(str, nodes_in_service().values_list("pk", flat=True))
    return {node_id: combine_claims(claims.get(node_id, ()), revisions) for node_id in nodes}
