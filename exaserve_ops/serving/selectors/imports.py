"""Imports of models: what nodes are told, what has arrived, and which node could take one in."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from uuid import UUID

from exaserve_ops.inventory.domain.drain import DRAINING
from exaserve_ops.inventory.domain.liveness import ALIVE
from exaserve_ops.inventory.selectors import nodes_in_service
from exaserve_ops.serving.domain.model_import import FAILED, MODEL_IMPORT, ImportPlace
from exaserve_ops.serving.models import FoundPart, ModelImport
from exaserve_ops.weights.domain.wanted import Origin, WantedImport
from exaserve_ops.weights.models import NodeStore


def live_imports() -> list[ModelImport]:
    """Imports that are not over, the oldest first."""
    rows = ModelImport.objects.filter(status__in=MODEL_IMPORT.live)
    return list(rows.select_related("node").order_by("created_at", "pk"))


def imports_by_node() -> dict[str, tuple[WantedImport, ...]]:
    """What each node is told to take in; failed ones, too, whose files it keeps."""
    found: dict[str, list[WantedImport]] = {}
    for row in live_imports():
        wanted = WantedImport(
            import_id=str(row.pk),
            name=row.name,
            origin=Origin(row.kind, row.location, row.secret),
            revision=row.revision,
            files=tuple(row.files),
            attempt=row.attempt,
            paused=row.status == FAILED,
        )
        found.setdefault(str(row.node_id), []).append(wanted)
    return {node_id: tuple(wanted) for node_id, wanted in found.items()}


def import_places() -> list[ImportPlace]:
    """All nodes in service, and whether each could take a model in."""
    stores = {store.node_id: store for store in NodeStore.objects.all()}
    imports = Counter(ModelImport.objects.filter(status__in=MODEL_IMPORT.live).values_list("node", flat=True))
    fields = ("pk", "name", "liveness", "cordoned", "drain_status", "simulated")
    places = []
    for pk, name, liveness, cordoned, drain, simulated in nodes_in_service().values_list(*fields):
        store = stores.get(pk)
        able = store is not None and not store.problem and store.disk_total_bytes > 0
        in_use = liveness == ALIVE and not cordoned and drain != DRAINING
        places.append(
            ImportPlace(
                node_id=str(pk),
                name=name,
                accepts=in_use and able and not simulated,
                free_bytes=store.disk_free_bytes if store is not None else 0,
                open_imports=imports[pk],
            )
        )
    return places


def findings_of(import_id: UUID) -> tuple[str, bytes] | None:
    """Digest and bytes of what was found, once all parts are here."""
    rows = list(FoundPart.objects.filter(model_import=import_id).order_by("index"))
    if not rows or len(rows) != rows[0].count:
        return None
    return rows[0].digest, b"".join(bytes(row.data) for row in rows)


def seconds_in_status(row: ModelImport, now: datetime) -> float:
    """How long an import has had its status."""
    return (now - row.status_changed_at).total_seconds()
