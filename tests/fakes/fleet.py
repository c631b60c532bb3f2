"""A node that speaks the real protocol over a real Redis, without an agent behind it."""

from __future__ import annotations

import base64
import json
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import redis

from exaserve_ops.inventory.models import FailureDomain, Node
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment
from workers.protocol import digests, names, v1
from workers.protocol.hardware import AcceleratorInfo
from workers.protocol.observed import AgentLiveness, ObservedState, ReplicaObserved

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
FLEET_SECRET = b"s" * 32
GIB = 1 << 30


@dataclass
class ScriptedNode:
    """Joins, reports what a test says, and remembers what it is told."""

    client: redis.Redis
    name: str = "node-a"
    node_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    boot_id: str = "boot-1"
    sequence: int = 0
    lease_epoch: int = 0
    accelerator_bytes: int = 8 * GIB
    engines: tuple[str, ...] = ("simulated",)
    labels: dict[str, str] = field(default_factory=dict)

    def enrol(self) -> Node:
        domain = FailureDomain.objects.create(kind="host", name=self.name)
        return Node.objects.create(pk=self.node_id, name=self.name, failure_domain=domain)

    @property
    def key(self) -> bytes:
        return digests.node_key(FLEET_SECRET, self.node_id, 1)

    def say_hello(self) -> None:
        accelerator = AcceleratorInfo(
            uuid=f"CPU-{self.node_id}", kind="cpu", name="cpu", memory_bytes=self.accelerator_bytes
        )
        self._send(
            v1.Hello(
                node_id=self.node_id,
                boot_id=self.boot_id,
                major=v1.MAJOR,
                minor=v1.MINOR,
                agent_version="1",
                hostname=self.name,
                address="127.0.0.1",
                accelerators=(accelerator,),
                engines=self.engines,
                labels=self.labels,
            )
        )

    def beat(self, *replicas: ReplicaObserved, **changes: Any) -> None:
        self.sequence += 1
        fields: dict[str, Any] = {
            "node_id": self.node_id,
            "boot_id": self.boot_id,
            "lease_epoch": self.lease_epoch,
            "sequence": self.sequence,
            "sent_at_seconds": NOW.timestamp(),
            "applied_revision": 1,
            "liveness": AgentLiveness(intake_age_seconds=1.0, reconcile_age_seconds=0.1),
            "replicas": replicas,
        }
        self._send(v1.Heartbeat(**(fields | changes)))

    def commands(self) -> list[v1.Command]:
        """What lies on the node's queue, oldest first; taken off it."""
        taken = []
        while (raw := self.client.rpop(names.node_queue(self.node_id))) is not None:
            body = json.loads(base64.b64decode(json.loads(raw)["body"]))
            message = base64.b64decode(body[0][0])
            command = v1.decode_command(v1.open_envelope(message), node_key=self.key)
            self.lease_epoch = max(self.lease_epoch, command.lease_epoch)
            taken.append(command)
        return taken

    def send(self, report: v1.Report) -> None:
        """Report something of its own, sealed as it does."""
        self._send(report)

    def _send(self, report: v1.Report, *, key: bytes | None = None) -> None:
        data = v1.encode_report(report, node_id=self.node_id, node_key=key or self.key)
        self.client.xadd(names.REPORT_STREAM, {"m": data})


def make_deployment(*, replicas: int = 2, name: str = "chat", now: datetime = NOW) -> Deployment:
    """A deployment of a model that needs no files, on the simulated engine."""
    model, _ = Model.objects.get_or_create(
        name="tiny", defaults={"digest": "sha256:0", "source": "file:///m"}
    )
    wish = DeploymentWish(
        name=name,
        model_id=model.pk,
        replicas=replicas,
        engine="simulated",
        replica_memory_bytes=GIB,
    )
    return create_deployment(wish, actor="user:test", now=now)


def seen(replica: Any, state: ObservedState, **changes: Any) -> ReplicaObserved:
    """A sighting of a recorded replica."""
    fields = {"replica_id": str(replica.pk), "generation": replica.generation, "state": state, "attempt": 1}
    if state == ObservedState.READY:
        fields |= {"address": "127.0.0.1:41000", "ports": (41000,), "pid": 4242}
    return ReplicaObserved(**(fields | changes))
