"""Several scripted nodes under one leader, which run whatever they are told to."""

from __future__ import annotations

import redis

from exaserve_ops.adapters.route_table import REPLICAS_KEY
from exaserve_ops.serving.models import Replica
from tests.fakes.fleet import ScriptedNode, seen
from tests.fakes.leader import Leader
from workers.protocol.observed import ObservedState, ReplicaObserved

State = ObservedState


class Fleet:
    """Scripted nodes that run whatever they are told to, under one leader."""

    def __init__(self, leader: Leader, client: redis.Redis, count: int) -> None:
        self.leader = leader
        self.client = client
        self.nodes = [ScriptedNode(client, name=f"node-{i}", boot_id=f"boot-{i}") for i in range(count)]
        self.silent: set[str] = set()
        self.states: dict[str, ReplicaObserved] = {}
        for node in self.nodes:
            node.enrol()
            node.say_hello()
        leader.work()

    def node_of(self, replica: Replica) -> ScriptedNode:
        return next(node for node in self.nodes if node.node_id == str(replica.node_id))

    def settle(self, *, rounds: int = 6) -> None:
        """Let agents obey and the leader work, a few times over."""
        for _ in range(rounds):
            self.beat()
            self.leader.work()

    def beat(self) -> None:
        for node in self.nodes:
            node.commands()
            if node.node_id in self.silent:
                continue
            rows = Replica.objects.filter(node=node.node_id).exclude(status="stopped").order_by("name")
            node.beat(*(self._sighting(row) for row in rows))

    def _sighting(self, row: Replica) -> ReplicaObserved:
        if row.wanted != "run":
            return seen(row, State.STOPPED)
        port = 41000 + int(row.name.rpartition("-")[2])  # its own for its whole life
        ready = seen(row, State.READY, address=f"127.0.0.1:{port}", ports=(port,))
        return self.states.get(str(row.pk), ready)

    def routed(self) -> set[str]:
        return {key.decode() for key in self.client.hkeys(REPLICAS_KEY)}
