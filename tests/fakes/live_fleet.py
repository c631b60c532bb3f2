"""Live pictures of a fleet that exists only on paper, published the way controllers do."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import redis

from exaserve_ops.adapters.live_store import RedisLivePublisher
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.lifecycle import READY, REPLICA
from exaserve_ops.telemetry.domain.frame_encoding import Cell, encode_frame
from exaserve_ops.telemetry.domain.frames import METRICS
from exaserve_ops.telemetry.domain.pictures import LivePicture, NodeReport

ValueOf = Callable[[int], float | None]


@dataclass
class PaperFleet:
    """Rows of nodes and columns of slots, each slot with a replica."""

    client: redis.Redis
    rows: int = 3
    columns: int = 2
    version: int = 1
    sequence: int = 0
    problems: int = 0
    replica_ids: dict[int, str] = field(default_factory=dict)
    reports: dict[str, NodeReport] = field(default_factory=dict)
    """Heartbeats that are published with the next picture, by node."""

    def reshape(self, rows: int, columns: int) -> None:
        """Give the fleet another shape: a new layout."""
        self.rows, self.columns = rows, columns
        self.version += 1

    def picture(self, value_of: ValueOf = lambda _cell: 0.5, *, status: str = READY) -> LivePicture:
        """The next second. Each cell has `value_of(cell)` for every ratio, and seconds alike."""
        self.sequence += 1
        index = REPLICA.statuses.index(status)
        cells = [Cell(index, (value_of(i),) * len(METRICS)) for i in range(self.rows * self.columns)]
        return LivePicture(
            sequence=self.sequence,
            layout=json.dumps(self._layout()).encode(),
            frame=encode_frame(
                cells,
                layout_version=self.version,
                sequence=self.sequence,
                built_at_seconds=clock.unix_seconds(),
            ),
            summary=json.dumps(self._summary()).encode(),
            nodes=dict(self.reports),
        )

    def publish(self, value_of: ValueOf = lambda _cell: 0.5, *, status: str = READY) -> None:
        """Publish the next second, from a thread of its own: a browser test's thread runs a loop."""
        picture = self.picture(value_of, status=status)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(RedisLivePublisher(self.client).publish, picture).result()

    def replica_id(self, cell: int) -> str:
        """Id of the replica in a cell; made up where none was given."""
        return self.replica_ids.setdefault(cell, str(uuid.uuid4()))

    def _layout(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "statuses": list(REPLICA.statuses),
            "metrics": [dataclasses.asdict(metric) for metric in METRICS],
            "columns": self.columns,
            "rows": [self._row(row) for row in range(self.rows)],
        }

    def _row(self, row: int) -> dict[str, Any]:
        return {
            "node_id": str(uuid.uuid4()),
            "name": f"node-{row}",
            "rack": f"rack-{row // 2}",
            "liveness": "alive",
            "simulated": False,
            "cells": [
                {
                    "id": self.replica_id(row * self.columns + slot),
                    "name": f"chat-{row}-{slot}",
                    "deployment": "chat",
                    "model": "tiny",
                }
                for slot in range(self.columns)
            ],
        }

    def _summary(self) -> dict[str, Any]:
        return {
            "sequence": self.sequence,
            "built_at": clock.unix_seconds(),
            "window_seconds": 60,
            "nodes": {"alive": self.rows, "suspect": 0, "dead": 0, "joining": 0},
            "replicas": {"ready": self.rows * self.columns, "wanted": self.rows * self.columns},
            "requests_per_second": 1.5,
            "tokens_per_second": 120.0,
            "ttft_seconds": {"p50": 0.1, "p95": None, "p99": None},
            "kv": {"used_ratio": 0.5, "used_blocks": 10, "total_blocks": 20},
            "sessions": {"live": 1, "repinned": 0},
            "problems": self.problems,
            "history": {"at": [1, 2], "kv_used_ratio": [0.4, None]},
        }
