"""How a model's weights go from node to node: recorded facts and live ones put together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    nodes = nodes_in_service().select_related("failure_domain__parent__parent")
    places = {str(node.pk): Place(node.name, rack_of(node)) for node in nodes}
    total = ModelFile.objects.filter(model=model).aggregate(bytes=Sum("size_bytes"))["bytes"]
    facts = SwarmFacts(
        revision=model.digest,
        total_bytes=int(total or 0),
        sights=reader.read_weights(places.keys()),
        places=places,
        notes=reader.read_swarms().get(model.digest),
    )
    return swarm_health(facts)
