"""Which replica stands where: read from the record when it changed, not for every picture."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any
from uuid import UUID

import msgspec

from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.selectors import nodes_in_service, rack_of
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.reach import is_open
from exaserve_ops.serving.models import Replica
from exaserve_ops.telemetry.domain.frames import METRICS

_STATUS_INDEX = {status: index for index, status in enumerate(states.REPLICA.statuses)}


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedReplica:
    """One replica on its node. `status`: index into the layout's statuses."""

    id: str
    status: int
    ready: bool
    deployment: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One node and its replicas, in the order of their cells."""

    node_id: str
    liveness: str
    replicas: tuple[PlacedReplica, ...]
    simulated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Directory:
    """All rows, and the layout that tells viewers of them."""

    rows: tuple[Row, ...] = ()
    columns: int = 0
    layout: bytes = b""
    """JSON object without its version."""
    digest: str = ""

    def serving(self) -> dict[str, str]:
        """Deployment of each replica that requests may go to, by replica id."""
        return {
            replica.id: replica.deployment for row in self.rows for replica in row.replicas if replica.ready
        }

    @property
    def node_ids(self) -> frozenset[str]:
        """Ids of all recorded nodes."""
        return frozenset(row.node_id for row in self.rows)


def read_directory() -> Directory:
    """All rows as recorded now; costly for a large fleet."""
    nodes = list(nodes_in_service().select_related("failure_domain__parent__parent"))
    nodes.sort(key=lambda node: (rack_of(node), node.name))
    placed: dict[UUID, list[tuple[Any, ...]]] = {node.pk: [] for node in nodes}
    for row in _replicas():
        if row[0] in placed:  # a node that was recorded between the two queries comes next time
            placed[row[0]].append(row)
    columns = max((len(rows) for rows in placed.values()), default=0)
    layout = msgspec.json.encode(
        {
            "statuses": list(states.REPLICA.statuses),
            "metrics": [dataclasses.asdict(metric) for metric in METRICS],
            "columns": columns,
            "rows": [_layout_row(node, placed[node.pk], columns) for node in nodes],
        }
    )
    rows = tuple(
        Row(str(node.pk), node.liveness, tuple(_placed(row) for row in placed[node.pk]), node.simulated)
        for node in nodes
    )
    return Directory(rows, columns, layout, hashlib.sha256(layout).hexdigest())


def _replicas() -> list[tuple[Any, ...]]:
    """Node id, replica id, name, status, deployment, model, role, reach and sleep of what has a place."""
    return list(
        Replica.objects.exclude(status=states.STOPPED)
        .exclude(node=None)
        .order_by("node__name", "name")
        .values_list(
            *("node_id", "pk", "name", "status", "deployment__name", "deployment__served_name"),
            *("role", "reach", "sleep_state"),
        )
    )


def _placed(row: tuple[Any, ...]) -> PlacedReplica:
    serves = row[3] == states.READY and row[6] == Replica.Role.SERVING and is_open(row[7], row[8])
    return PlacedReplica(str(row[1]), _STATUS_INDEX[row[3]], serves, deployment=row[4])


def _layout_row(node: Node, rows: list[tuple[Any, ...]], columns: int) -> dict[str, Any]:
    cells: list[dict[str, str] | None] = [
        {"id": str(replica_id), "name": name, "deployment": deployment, "model": model}
        for _, replica_id, name, _, deployment, model, *_ in rows
    ]
    return {
        "node_id": str(node.pk),
        "name": node.name,
        "rack": rack_of(node),
        "liveness": node.liveness,
        "simulated": node.simulated,
        "cells": cells + [None] * (columns - len(rows)),
    }
