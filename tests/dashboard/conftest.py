"""What tests of pages and sockets share."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.test import Client
from django.urls import reverse

from exaserve_ops.access.models import ApiKey
from exaserve_ops.adapters.compiled_folder import CompiledFolder
from exaserve_ops.adapters.gateway_reports import GatewayReportReader
from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.dashboard import ports, urls
from exaserve_ops.health.services.incidents import open_incident
from exaserve_ops.inventory.models import Node, SshHostKey
from exaserve_ops.inventory.services.installations import InstallationWish, create_installation
from exaserve_ops.rollouts.domain.policy import RolloutPolicy
from exaserve_ops.rollouts.models import Rollout
from exaserve_ops.rollouts.services.rollouts import create_rollout, preview_rollout
from exaserve_ops.serving.models import Deployment, Model, ModelImport
from exaserve_ops.serving.services.models import register_model
from exaserve_ops.serving.services.releases import ReleaseWish
from exaserve_ops.serving.services.replicas import create_replicas
from exaserve_ops.sessions.domain.pace import MoveLimits
from exaserve_ops.sessions.models import InferenceSession
from exaserve_ops.telemetry.domain.pictures import LivePicture, LogEntry
from exaserve_ops.validation.services import ValidationWish, ask_validation
from exaserve_ops.weights.domain.held import StoreSight
from exaserve_ops.weights.domain.swarm_notes import SwarmNotes
from tests.fakes.world import NOW, make_deployment, make_node, make_user
from workers.engines.demo_model import make_demo_model

OPEN_TO_ALL = {"login", "logout"}
World = dict[str, Any]
"""Ids of the objects that the addresses of pages name."""


@dataclass
class MemoryReader:
    """Stands in for the live store: what was put in comes out."""

    frame: bytes | None = None
    summary: bytes | None = None
    layout: bytes | None = None
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    kv: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: list[LogEntry] = field(default_factory=list)
    """Of a head, or of a replica on one node."""
    member_logs: dict[int, list[LogEntry]] = field(default_factory=dict)
    weights: dict[str, StoreSight] = field(default_factory=dict)
    swarms: dict[str, SwarmNotes] = field(default_factory=dict)
    frame_reads: int = 0

    def show(self, picture: LivePicture) -> None:
        self.frame, self.summary, self.layout = picture.frame, picture.summary, picture.layout

    async def fetch_frame(self) -> bytes | None:
        self.frame_reads += 1
        return self.frame

    async def fetch_summary(self) -> bytes | None:
        return self.summary

    async def fetch_log(self, replica_id: str, member: int, after: str, limit: int) -> list[LogEntry]:  # noqa: ARG002 - the port's
        log = self.member_logs.get(member, []) if member else self.log
        return [entry for entry in log if entry.position > after][:limit]

    def read_node(self, node_id: str) -> dict[str, Any] | None:
        return self.nodes.get(node_id)

    def read_nodes(self, node_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        return {node_id: self.nodes[node_id] for node_id in node_ids if node_id in self.nodes}

    def read_kv(self, node_id: str) -> dict[str, Any] | None:
        return self.kv.get(node_id)

    async def fetch_kv(self, node_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        return {node_id: self.kv[node_id] for node_id in node_ids if node_id in self.kv}

    def read_weights(self, node_ids: Collection[str]) -> dict[str, StoreSight]:
        return {node_id: self.weights[node_id] for node_id in node_ids if node_id in self.weights}

    def read_swarms(self) -> dict[str, SwarmNotes]:
        return self.swarms

    def read_layout(self) -> bytes | None:
        return self.layout

    def read_summary(self) -> dict[str, Any] | None:
        return None


@pytest.fixture
def reader(tmp_path: Path) -> MemoryReader:
    """The reader that pages and sockets use in this test."""
    reader = MemoryReader()
    ports.live_reader.use(reader)
    ports.model_folder_reader.use(ModelFolder())
    ports.compiled_folder_reader.use(CompiledFolder((tmp_path,)))
    ports.move_limits.use(MoveLimits())
    ports.gateway_reports.use(GatewayReportReader(redis.Redis.from_url(os.environ["REDIS_URL"])))
    return reader


@pytest.fixture
def operator(db: None, reader: MemoryReader) -> Client:  # noqa: ARG001 - pages read both
    client = Client()
    client.force_login(make_user("olga", "operator"))
    return client


@pytest.fixture
def viewer(db: None, reader: MemoryReader) -> Client:  # noqa: ARG001 - pages read both
    client = Client()
    client.force_login(make_user("vera", "viewer"))
    return client


@pytest.fixture
def world(operator: Client) -> World:  # noqa: ARG001 - opens the database
    """One of everything."""
    deployment = make_deployment("chat", replicas=2)
    replica = create_replicas(deployment.pk, 1, why="1 of 2", actor="test", now=NOW)[0]
    session = InferenceSession.objects.create(
        session_id="s-1", model_name="tiny", replica=replica, first_turn_at=NOW, last_turn_at=NOW
    )
    node = make_node("gpu-1")
    return {
        "import_id": make_import(node).pk,
        "rollout_id": begin_rollout(deployment).pk,
        "validation_id": ask_validation(
            ValidationWish(model_id=deployment.model_id, engines=("torch",)),
            reason="new weights",
            actor="user:olga",
            now=NOW,
        ).pk,
        "node_id": node.pk,
        "incident_id": open_incident(
            "mass_silence", scope="fleet", node_ids=[], evidence="all at once", actor="test", now=NOW
        ).pk,
        "installation_id": create_installation(
            InstallationWish("gpu-2.example", "ops", "agent"), actor="test", now=NOW
        ).pk,
        "pin_id": SshHostKey.objects.create(host="gpu-2.example", key_type="ssh-ed25519", blob="AAAA").pk,
        "deployment_id": deployment.pk,
        "replica_id": replica.pk,
        "model_id": deployment.model_id,
        "compiled_id": uuid4(),
        "pk": session.pk,
        "key_id": ApiKey.objects.create(
            name="k", user=make_user("kim"), prefix="xo-abc", sha256="0" * 64, scopes=["api"]
        ).pk,
    }


def make_import(node: Node, **changes: Any) -> ModelImport:
    """A model that a node is to fetch from a hub."""
    fields = {"name": "big", "kind": "hub", "location": "https://hub.example/o/n", "reason": "for chat"}
    times = {"created_at": NOW, "status_changed_at": NOW}
    return ModelImport.objects.create(node=node, asked_by="user:olga", **(fields | times | changes))


@pytest.fixture
def stored_model(tmp_path: Path, world: World) -> Model:  # noqa: ARG001 - nodes for it
    """A model that has a manifest, so that nodes can fetch it."""
    make_demo_model(tmp_path / "stored", seed=0)
    facts = ModelFolder().read(str(tmp_path / "stored"))
    return register_model(name="stored", facts=facts, actor="test", now=NOW)


def begin_rollout(deployment: Deployment) -> Rollout:
    """A rollout that has begun, of a deployment that runs its first release."""
    wish, policy = ReleaseWish(engine_options={"max_num_seqs": 2}), RolloutPolicy()
    plan = preview_rollout(deployment.pk, wish, policy, actor="user:olga", now=NOW)
    return create_rollout(
        deployment.pk, wish, policy, reason="faster", confirmed=plan.digest, actor="user:olga", now=NOW
    )


def addresses(world: World) -> dict[str, str]:
    """Every page's name and an address of it."""
    found = {}
    for pattern in urls.urlpatterns:
        wanted = pattern.pattern.converters
        found[str(pattern.name)] = reverse(str(pattern.name), kwargs={key: world[key] for key in wanted})
    return found
