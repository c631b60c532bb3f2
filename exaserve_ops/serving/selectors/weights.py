"""What weights nodes are to have, by models, replicas and claims; and which nodes have a model's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Max, Sum

from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.serving.models import CompiledSet, Model, ModelManifest, Replica
from exaserve_ops.serving.selectors.compiled import FOLDER, compiled_claims, compiled_revisions
from exaserve_ops.serving.selectors.members import (
    KNOWN_TO_AGENTS,
    MEMBER_WAITS,
    WAITS_TO_START,
    live_members,
)
from exaserve_ops.weights.domain.held import ABSENT, READY, WeightsOnNode
from exaserve_ops.weights.domain.wanted import REPLICA, Claim, Origin, Revision, WantedWeights, combine_claims
from exaserve_ops.weights.models import NodeWeights, PrewarmPolicy, WeightsClaim
from exaserve_ops.weights.selectors import claims_by_node, weights_on


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


LiveNodes = Callable[[Collection[str]], Mapping[str, Mapping[str, Any]]]
"""Newest telemetry of nodes, by id; without those that have reported nothing."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A model's weights on one node, as recorded, with what its last heartbeat says of speed."""

    node_id: UUID
    name: str
    simulated: bool
    state: str = ABSENT
    reason: str = ""
    have_bytes: int = 0
    total_bytes: int = 0
    bytes_per_second: float = 0.0
    eta_seconds: float | None = None
    in_use: bool = False
    damaged_pieces: int = 0
    spoilt: bool = False
    owners: tuple[str, ...] = ()
    paused: bool = False
    sources: Mapping[str, int] = field(default_factory=dict)
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model's weights on all nodes in service."""

    model: UUID
    revision: str
    manifest_digest: str
    storage: str
    origins: tuple[Origin, ...]
    policy: PrewarmPolicy | None
    nodes: tuple[NodeRow, ...]


def model_weights(model: Model, live: LiveNodes) -> ModelWeights:
    """How a model's weights stand on every node in service, by name."""
    manifest = ModelManifest.objects.filter(model=model).values_list("digest", flat=True).first()
    return ModelWeights(
        model=model.pk,
        revision=model.digest,
        manifest_digest=manifest or "",
        storage=model.storage,
        origins=origins_of(model),
        policy=PrewarmPolicy.objects.filter(revision=model.digest).first(),
        nodes=_node_rows(model.digest, live),
    )


def _node_rows(revision: str, live: LiveNodes) -> tuple[NodeRow, ...]:
    recorded = {row.node_id: row for row in NodeWeights.objects.filter(revision=revision)}
    claims: dict[UUID, list[tuple[str, bool]]] = {}
    rows = WeightsClaim.objects.filter(revision=revision).order_by("owner")
    for node_id, owner, paused in rows.values_list("node", "owner", "paused"):
        claims.setdefault(node_id, []).append((owner, paused))
    moving = [str(node_id) for node_id, row in recorded.items() if row.state != READY]
    speeds = {node_id: _live_of(revision, told) for node_id, told in live(moving).items()}
    nodes = list(nodes_in_service().order_by("name").values_list("pk", "name", "simulated"))
    names = {str(pk): name for pk, name, _ in nodes}
    return tuple(
        _node_row(
            _with_claims(NodeRow(pk, name, simulated), claims.get(pk, ())),
            recorded.get(pk),
            speeds.get(str(pk), {}),
            names,
        )
        for pk, name, simulated in nodes
    )


def _with_claims(row: NodeRow, claims: Sequence[tuple[str, bool]]) -> NodeRow:
    return replace(
        row,
        owners=tuple(owner for owner, _ in claims),
        paused=bool(claims) and all(paused for _, paused in claims),
    )


def _node_row(
    row: NodeRow, known: NodeWeights | None, now: Mapping[str, Any], names: Mapping[str, str]
) -> NodeRow:
    if known is None:
        return row
    return replace(
        row,
        state=known.state,
        # A heartbeat is newer than the record, which notes reasons of waiting and failing alone.
        reason=str(now.get("reason", "")) if now else known.reason,
        have_bytes=int(now.get("have_bytes", known.have_bytes)),
        total_bytes=known.total_bytes,
        bytes_per_second=float(now.get("bytes_per_second", 0.0)),
        eta_seconds=now.get("eta_seconds"),
        in_use=known.in_use,
        damaged_pieces=known.damaged_pieces,
        spoilt=known.spoilt,
        sources=_sources(known, now, names),
        since=known.since,
    )


def _live_of(revision: str, told: Mapping[str, Any]) -> Mapping[str, Any]:
    held = (told.get("weights") or {}).get("held", ())
    return next((one for one in held if one.get("revision") == revision), {})


def _sources(known: NodeWeights, now: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    """Bytes by where they came from; nodes by their names."""
    told = [(one["kind"], one.get("name", ""), one["bytes"]) for one in now.get("sources", ())]
    counts = told or [(kind, name, count) for kind, name, count in known.sources]
    return {f"{kind} {names.get(name, name)}".strip(): int(count) for kind, name, count in counts}


def origins_of(model: Model) -> tuple[Origin, ...]:
    """Where nodes fetch a model, nearest first."""
    told = tuple(
        Origin(str(place["kind"]), str(place["location"]), str(place.get("secret", "")))
        for place in model.origins
    )
    return told or (Origin(FOLDER, model.source),)


def known_revisions() -> dict[str, Revision]:
    """Every revision that has a manifest, with the places of all models of these bytes.

    Also what engines compiled for models.
    """
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
    return found | compiled_revisions()


def manifest_body(digest: str) -> bytes:
    """Bytes of a manifest. Raises `ModelManifest.DoesNotExist`."""
    row = ModelManifest.objects.filter(digest=digest).first()
    if row is not None:
        return bytes(row.body)
    compiled = CompiledSet.objects.filter(manifest_digest=digest).first()
    if compiled is None:
        raise ModelManifest.DoesNotExist(f"no manifest {digest}")
    return bytes(compiled.manifest_body)


def wanted_by_node(revisions: Mapping[str, Revision]) -> dict[str, tuple[WantedWeights, ...]]:
    """What each node in service is to have on its disk, in a few queries."""
    claims = claims_by_node()
    rows = (
        Replica.objects.filter(
            status__in=KNOWN_TO_AGENTS, node__isnull=False, release__model__storage=Model.Storage.NODE
        )
        .exclude(WAITS_TO_START)
        .values_list("node_id", "release__model__digest")
        .order_by()
        .distinct()
    )
    of_members = live_members().exclude(MEMBER_WAITS)
    of_members = of_members.filter(replica__release__model__storage=Model.Storage.NODE)
    placed = {*rows, *of_members.values_list("node_id", "replica__release__model__digest")}
    for node_id, digest in sorted(placed):
        claims.setdefault(str(node_id), []).append(Claim(digest, REPLICA))
    for node, compiled in compiled_claims(claims).items():
        claims.setdefault(node, []).extend(compiled)
    nodes = map(str, nodes_in_service().values_list("pk", flat=True))
    return {node_id: combine_claims(claims.get(node_id, ()), revisions) for node_id in nodes}
