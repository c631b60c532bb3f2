"""How a model's weights go from node to node: recorded facts and live ones put together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from django.db.models import Sum

from exaserve_ops.inventory.selectors import nodes_in_service, rack_of
from exaserve_ops.serving.models import Model, ModelFile
from exaserve_ops.weights.domain.held import StoreSight
from exaserve_ops.weights.domain.swarm_notes import SwarmNotes
from exaserve_ops.weights.domain.swarms import Place, SwarmFacts, SwarmHealth, swarm_health


class SwarmReader(Protocol):
    """Reads what nodes say of weights, and what the leader notes of swarms."""

    def read_weights(self, node_ids: Collection[str], /) -> Mapping[str, StoreSight]:
        """Weights on nodes' disks, by node; without those that tell nothing of any."""
        ...

    def read_swarms(self) -> Mapping[str, SwarmNotes]:
        """Swarms of the last day, by revision."""
        ...


def model_swarm(model: Model, reader: SwarmReader) -> SwarmHealth:
    """How a model's weights go from node to node now, or went last. Two queries."""
    [health] = _swarms_of([model], reader, reader.read_swarms())
    return health


def swarms_since(since_seconds: float, reader: SwarmReader) -> list[tuple[Model, SwarmHealth]]:
    """Each model whose weights go from node to node now, or did until then; by name. Three queries."""
    noted = reader.read_swarms()
    fresh = {
        revision
        for revision, notes in noted.items()
        if notes.ended_at_seconds is None or notes.ended_at_seconds >= since_seconds
    }
    models = list(Model.objects.filter(digest__in=fresh).order_by("name")) if fresh else []
    return list(zip(models, _swarms_of(models, reader, noted), strict=True)) if models else []


def _swarms_of(
    models: Sequence[Model], reader: SwarmReader, noted: Mapping[str, SwarmNotes]
) -> list[SwarmHealth]:
    nodes = nodes_in_service().select_related("failure_domain__parent__parent")
    places = {str(node.pk): Place(node.name, rack_of(node)) for node in nodes}
    sights = reader.read_weights(places.keys())
    files = ModelFile.objects.filter(model__in=models).values("model").order_by()
    totals = {row["model"]: row["bytes"] for row in files.annotate(bytes=Sum("size_bytes"))}
    return [
        swarm_health(
            SwarmFacts(
                revision=model.digest,
                total_bytes=int(totals.get(model.pk, 0)),
                sights=sights,
                places=places,
                notes=noted.get(model.digest),
            )
        )
        for model in models
    ]
