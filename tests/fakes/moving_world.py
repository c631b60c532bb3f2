"""A leader and two nodes with a conversation that is to move from one to the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import redis

from exaserve_ops.adapters.session_pins import RedisSessionPins
from exaserve_ops.adapters.session_table import DEFAULT_TTL_SECONDS
from exaserve_ops.controllers.moves import MovePolicy, SessionMoves
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.engine_launch import TORCH
from exaserve_ops.serving.models import Release, Replica
from exaserve_ops.sessions.domain.moves import Pin
from exaserve_ops.sessions.models import InferenceSession, Relocation
from exaserve_ops.sessions.services.relocations import ask_move
from tests.fakes.fleet import ScriptedNode, make_deployment, seen
from tests.fakes.leader import Leader, leading
from tests.fakes.session_entries import age_entries
from workers.protocol import v1
from workers.protocol.observed import ObservedState

SESSION = "a conversation"


@dataclass
class MovingWorld:
    """A leader, two nodes with a ready replica each, and a conversation at the first."""

    leader: Leader
    nodes: dict[UUID, ScriptedNode]
    source: Replica
    target: Replica
    pins: RedisSessionPins
    session: InferenceSession

    def __post_init__(self) -> None:
        self.moves = self.lead_anew()

    def lead_anew(self, **policy: Any) -> SessionMoves:
        """Another leader, which has only the record."""
        self.moves = SessionMoves(
            self.leader.state, self.leader.reconcilers._link, self.pins, MovePolicy(**policy)
        )
        return self.moves

    def node_of(self, replica: Replica) -> ScriptedNode:
        assert replica.node_id is not None
        return self.nodes[replica.node_id]

    def told(self, kind: type[Any], at: Replica | None = None) -> list[Any]:
        return [c for c in self.node_of(at or self.source).commands() if isinstance(c, kind)]

    def ask(self) -> Relocation:
        return ask_move(self.session.pk, self.target.pk, reason="closer", actor="user:o", now=clock.now())

    def begin(self) -> v1.MoveSession:
        """Ask, step, and take the order off the source's queue."""
        self.ask()
        self.moves.step()
        [order] = self.told(v1.MoveSession)
        return order

    def answer(self, order: v1.MoveSession, **facts: Any) -> None:
        node = self.node_of(self.source)
        fields: dict[str, Any] = {
            "sent_bytes": 4096,
            "target_tokens": 64,
            "seconds": 0.1,
            "blocks": 4,
            "carrier": "tcp",
        }
        node._send(v1.SessionSent(node_id=node.node_id, command_id=order.command_id, **(fields | facts)))
        self.leader.ingest.step()

    def row(self) -> Relocation:
        return Relocation.objects.latest("created_at")

    def pin(self) -> Pin | None:
        return self.pins.find("tiny", SESSION, [str(self.source.pk), str(self.target.pk)])

    def claim(self) -> None:
        """A turn at the source, as a gateway counts it."""
        self.pins._ask(lambda: self.pins._table.claimed("tiny", SESSION, str(self.source.pk)))


@contextmanager
def moving_world(redis_client: redis.Redis) -> Iterator[MovingWorld]:
    """The world, with the session's last turn ended a minute ago."""
    with leading(redis_client) as leader:
        nodes = [ScriptedNode(redis_client, name=name) for name in ("node-a", "node-b")]
        for node in nodes:
            node.enrol()
            node.say_hello()
        leader.work()
        deployment = make_deployment(replicas=2)
        for _ in range(3):
            leader.work()
        for node in nodes:
            node.commands()
        by_node = {UUID(node.node_id): node for node in nodes}
        for replica in Replica.objects.filter(deployment=deployment):
            assert replica.node_id is not None
            ready = seen(replica, ObservedState.READY)
            by_node[replica.node_id].beat(ready)
        leader.work()
        Release.objects.update(engine=TORCH)  # nodes here offer another one; no other can send KV
        source, target = Replica.objects.filter(deployment=deployment, status="ready").order_by("name")
        for node in nodes:
            node.commands()
        now = clock.now()
        session = InferenceSession.objects.create(
            session_id=SESSION, model_name="tiny", replica=source, context_tokens=64, first_turn_at=now,
            last_turn_at=now,
        )  # fmt: skip
        pins = RedisSessionPins(os.environ["REDIS_URL"], ttl_seconds=DEFAULT_TTL_SECONDS)
        made = MovingWorld(leader, by_node, source, target, pins, session)
        made.claim()
        age_entries(redis_client, 60)  # that turn has ended
        yield made
        pins.close()
