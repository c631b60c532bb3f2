"""What engines compiled: which node is to have which set, and who has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db.models import Count, Q

from exaserve_ops.inventory.models import Accelerator
from exaserve_ops.serving.domain.compiled import fits
from exaserve_ops.serving.models import CompiledSet, Replica
from exaserve_ops.serving.selectors.members import (
    KNOWN_TO_AGENTS,
    MEMBER_WAITS,
    WAITS_TO_START,
    live_members,
)
from exaserve_ops.weights.domain.held import FAILED, READY
from exaserve_ops.weights.domain.wanted import COMPILED, Claim, Origin, Revision
from exaserve_ops.weights.models import NodeWeights

FOLDER = "folder"


@dataclass(frozen=True, slots=True)
class CompiledView:
    """One set, and how far nodes are with it."""

    id: UUID
    engine: str
    hardware: str
    digest: str
    total_bytes: int
    file_count: int
    origins: tuple[Origin, ...]
    registered_by: str
    created_at: datetime
    nodes: int
    """That told of it."""
    ready_nodes: int
    failed_nodes: int


def compiled_of(model_id: UUID) -> tuple[CompiledView, ...]:
    """Every set of a model, by engine and hardware; two queries."""
    sets = list(CompiledSet.objects.filter(model=model_id).defer("manifest_body"))
    rows = NodeWeights.objects.filter(revision__in=[one.digest for one in sets]).values("revision").order_by()
    counts = {
        row["revision"]: (int(row["nodes"]), int(row["ready"]), int(row["failed"]))
        for row in rows.annotate(
            nodes=Count("pk"),
            ready=Count("pk", Q(state=READY)),
            failed=Count("pk", Q(state=FAILED)),
        )
    }
    return tuple(_view(one, counts.get(one.digest, (0, 0, 0))) for one in sets)


def _view(one: CompiledSet, counts: tuple[int, int, int]) -> CompiledView:
    nodes, ready, failed = counts
    return CompiledView(
        id=one.pk,
        engine=one.engine,
        hardware=one.hardware,
        digest=one.digest,
        total_bytes=one.total_bytes,
        file_count=one.file_count,
        origins=_origins(one),
        registered_by=one.registered_by,
        created_at=one.created_at,
        nodes=nodes,
        ready_nodes=ready,
        failed_nodes=failed,
    )


def _origins(one: CompiledSet) -> tuple[Origin, ...]:
    told = tuple(
        Origin(str(place["kind"]), str(place["location"]), str(place.get("secret", "")))
        for place in one.origins
    )
    return told or (Origin(FOLDER, one.source),)


def compiled_revisions() -> dict[str, Revision]:
    """Every set, by its digest, as nodes are told of it."""
    found: dict[str, Revision] = {}
    for one in CompiledSet.objects.select_related("model").defer("manifest_body"):
        before = found.get(one.digest)
        origins = dict.fromkeys((*(before.origins if before else ()), *_origins(one)))
        found[one.digest] = Revision(
            digest=one.digest,
            manifest_digest=one.manifest_digest,
            total_bytes=one.total_bytes,
            name=f"what {one.engine} compiled for {one.model.name}",
            origins=tuple(origins),
            engine_cache=one.engine,
        )
    return found


def compiled_claims(claims: Mapping[str, Sequence[Claim]]) -> dict[str, list[Claim]]:
    """Claims on sets, by node: where a replica of the model runs by that engine, or its weights are claimed.

    On nodes alone whose hardware they were compiled for. One query where nothing is registered.
    """
    sets = list(CompiledSet.objects.select_related("model").defer("manifest_body"))
    if not sets:
        return {}
    hardware: dict[str, list[tuple[str, str]]] = {}
    for node_id, kind, name in Accelerator.objects.values_list("node_id", "kind", "name"):
        hardware.setdefault(str(node_id), []).append((kind, name))
    rows = Replica.objects.filter(status__in=KNOWN_TO_AGENTS, node__isnull=False).exclude(WAITS_TO_START)
    rows = rows.order_by().distinct()
    members = live_members().exclude(MEMBER_WAITS)
    runs: set[tuple[str, str, str]] = {
        (str(node_id), digest, engine)
        for node_id, digest, engine in (
            *rows.values_list("node_id", "release__model__digest", "release__engine"),
            *members.values_list("node_id", "replica__release__model__digest", "replica__release__engine"),
        )
    }
    holds = {(node_id, claim.revision) for node_id, each in claims.items() for claim in each}
    found: dict[str, list[Claim]] = {}
    for one in sets:
        digest = one.model.digest
        nodes = {where for where, model, engine in runs if (model, engine) == (digest, one.engine)}
        nodes |= {where for where, model in holds if model == digest}
        for node in nodes:
            if fits(one.hardware, hardware.get(node, ())):
                found.setdefault(node, []).append(Claim(one.digest, COMPILED))
    return found
