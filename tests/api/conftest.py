"""People, keys and a small fleet for the tests of REST."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from exaserve_ops.adapters.compiled_folder import CompiledFolder
from exaserve_ops.adapters.gateway_reports import GatewayReportReader
from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.adapters.store_users import RedisStoreUsers
from exaserve_ops.api.ports import (
    compiled_folder_reader,
    gateway_reports,
    model_folder_reader,
    move_limits,
    replica_loads,
    store_users,
)
from exaserve_ops.api.views.agent import REFUSALS
from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.models import Deployment
from exaserve_ops.sessions.domain.pace import MoveLimits
from exaserve_ops.telemetry.domain.pictures import LogEntry
from exaserve_ops.weights.domain.held import StoreSight
from exaserve_ops.weights.domain.swarm_notes import SwarmNotes
from tests.fakes.world import JsonClient, client_with_key, make_deployment, make_node, make_user


@dataclass
class Telemetry:
    """Stands in for the live store: what was put in comes out."""

    nodes: dict[str, dict[str, Any]]
    kv: dict[str, dict[str, Any]] = field(default_factory=dict)
    weights: dict[str, StoreSight] = field(default_factory=dict)
    swarms: dict[str, SwarmNotes] = field(default_factory=dict)
    logs: dict[tuple[str, int], list[LogEntry]] = field(default_factory=dict)
    """By replica and member."""

    def read_log(self, replica_id: str, member: int, after: str, limit: int) -> list[LogEntry]:
        log = self.logs.get((replica_id, member), [])
        return [entry for entry in log if entry.position > after][:limit]

    def read_swarms(self) -> dict[str, SwarmNotes]:
        return self.swarms

    def read_node(self, node_id: str) -> dict[str, Any] | None:
        return self.nodes.get(node_id)

    def read_nodes(self, node_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        return {node_id: self.nodes[node_id] for node_id in node_ids if node_id in self.nodes}

    def read_kv(self, node_id: str) -> dict[str, Any] | None:
        return self.kv.get(node_id)

    def read_weights(self, node_ids: Collection[str]) -> dict[str, StoreSight]:
        return {node_id: self.weights[node_id] for node_id in node_ids if node_id in self.weights}


@pytest.fixture(autouse=True)
def telemetry(tmp_path: Path) -> Iterator[Telemetry]:
    """The ports of REST, filled with what the tests use."""
    store = Telemetry({})
    replica_loads.use(store)
    move_limits.use(MoveLimits())
    gateway_reports.use(GatewayReportReader(redis.Redis.from_url(os.environ["REDIS_URL"])))
    model_folder_reader.use(ModelFolder())
    compiled_folder_reader.use(CompiledFolder((tmp_path,)))
    store_users.use(RedisStoreUsers(redis.Redis.from_url(os.environ["REDIS_URL"])))
    REFUSALS.clear()
    yield store
    REFUSALS.clear()


@pytest.fixture
def as_role(db: None) -> Callable[[str], JsonClient]:  # noqa: ARG001 - opens the database
    """A client with an API key of a fresh user in a group."""

    def client(role: str) -> JsonClient:
        return client_with_key(make_user(f"{role or 'nobody'}-{uuid4().hex[:6]}", role))

    return client


@pytest.fixture
def viewer(as_role: Callable[[str], JsonClient]) -> JsonClient:
    return as_role("viewer")


@pytest.fixture
def operator(as_role: Callable[[str], JsonClient]) -> JsonClient:
    return as_role("operator")


@pytest.fixture
def admin(as_role: Callable[[str], JsonClient]) -> JsonClient:
    return as_role("admin")


@pytest.fixture
def node(db: None) -> Node:  # noqa: ARG001 - opens the database
    return make_node("n1")


@pytest.fixture
def deployment(db: None) -> Deployment:  # noqa: ARG001 - opens the database
    return make_deployment()


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder as a hub would hold it, with the smallest content that is one."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,'
        ' "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 2048, "dtype": "float32"}'
    )
    (folder / "tokenizer.json").write_text("{}")
    header = b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    return folder
