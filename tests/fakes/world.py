"""A small fleet in the database, made through the services: people, nodes, models, deployments."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from uuid import UUID, uuid4

from django.contrib.auth.models import Group, User
from rest_framework.test import APIClient

from exaserve_ops.access.services import create_api_key
from exaserve_ops.inventory.domain.facts import AcceleratorFacts, NodeFacts
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import (
    advance_liveness,
    create_join_token,
    enrol_node,
    record_hello,
)
from exaserve_ops.serving.domain.architecture import Architecture
from exaserve_ops.serving.domain.manifest import FileEntry
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment
from exaserve_ops.serving.services.models import ModelFacts, register_model
from workers.protocol import v1

GIB = 1 << 30
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class JsonClient(APIClient):
    """Speaks JSON unless told otherwise."""

    default_format = "json"


def make_user(name: str, role: str = "") -> User:
    user = User.objects.create_user(name, password="a long enough password")
    if role:
        user.groups.add(Group.objects.get(name=role))
    return user


def client_with_key(user: User, scopes: tuple[str, ...] = ("api",)) -> JsonClient:
    _, text = create_api_key(user=user, name="test", scopes=scopes, actor="test", now=NOW)
    client = JsonClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    return client


def make_node(name: str, *, accelerators: int = 2, rack: str = "r1", supernode: str = "") -> Node:
    _, text = create_join_token(actor="test", now=NOW)
    node = enrol_node(token_text=text, node_id=uuid4(), name=name, hostname=f"{name}.local", now=NOW)
    devices = tuple(
        AcceleratorFacts(f"GPU-{name}-{i}", "cuda", "H200", 8 * GIB, i) for i in range(accelerators)
    )
    facts = NodeFacts(
        hostname=f"{name}.local",
        address="10.0.0.1",
        agent_version="0.1",
        protocol_minor=v1.MINOR,
        boot_id="b1",
        engines=("torch", "simulated"),
        labels={"rack": rack} | ({"supernode": supernode} if supernode else {}),
        accelerators=devices,
    )
    record_hello(node.pk, facts, now=NOW)
    return advance_liveness(node.pk, "reported", reason="", actor="test", now=NOW)


def make_model(name: str = "tiny") -> Model:
    facts = ModelFacts(
        source=f"file:///models/{name}",
        files=(FileEntry("model.safetensors", 1000, hashlib.sha256(name.encode()).hexdigest()),),
        architecture=Architecture("llama", 2, 64, 4, 2, 16, 256, 2048, "float32"),
        parameter_count=250,
    )
    return register_model(name=name, facts=facts, actor="test", now=NOW)


def make_deployment(name: str = "chat", *, replicas: int = 2, model: UUID | None = None) -> Deployment:
    model_id = model or make_model(f"model-of-{name}").pk
    wish = DeploymentWish(
        name=name, model_id=model_id, replicas=replicas, engine="torch", replica_memory_bytes=GIB
    )
    return create_deployment(wish, actor="test", now=NOW)
