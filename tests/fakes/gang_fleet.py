"""Nodes over a real Redis whose agents do their part of a replica over several nodes, at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import redis

from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment
from tests.fakes.fleet import GIB, NOW, ScriptedNode
from tests.fakes.leader import Leader
from workers.protocol import v1
from workers.protocol.observed import ExitInfo, ObservedState, ReplicaObserved
from workers.protocol.wish import GangMember, ReplicaSpec, WantedState


@dataclass
class GangNode:
    """Launches at most once for each epoch, and says what became of it."""

    node: ScriptedNode
    spec: ReplicaSpec | None = None
    running: int = 0
    """Epoch of the process; 0: none."""
    launched: dict[int, int] = field(default_factory=dict)
    """Attempt by epoch."""
    died: set[int] = field(default_factory=set)
    exit_code: int | None = None
    """With which it ended by itself; `None`: by a signal."""
    last_lines: tuple[str, ...] = ()
    """Of the log of the process that ended."""
    is_stuck: bool = False
    forgotten: bool = False

    @property
    def member(self) -> GangMember:
        assert self.spec is not None
        assert self.spec.member is not None
        return self.spec.member

    def die(self, exit_code: int | None = None) -> None:
        """Its process is killed, or exits."""
        self.exit_code = exit_code
        self.died.add(self.running)
        self.running = 0

    def take_in(self) -> None:
        for command in self.node.commands():
            if isinstance(command, v1.ApplyDesired):
                self.spec = next(iter(command.replicas), None)
            if isinstance(command, v1.ForgetReplica):
                self.forgotten = True
        if self.spec is None or self.spec.wanted is not WantedState.RUN:
            self.running = 0
        elif self.running != self.member.epoch:
            self.running = 0
            self._launch(self.member)

    def _launch(self, member: GangMember) -> None:
        ready_to = member.number == 0 or (member.head_address and member.rendezvous)
        if ready_to and member.epoch not in self.launched:
            self.running = member.epoch
            self.launched[member.epoch] = len(self.launched) + 1

    def report(self) -> None:
        self.node.beat(*([] if self.spec is None else [self._seen(self.spec, self.member)]))

    def _seen(self, spec: ReplicaSpec, member: GangMember) -> ReplicaObserved:
        is_head = member.number == 0 and bool(self.running)
        attempt = max(self.launched.values(), default=0)
        signal = 9 if self.exit_code is None else None
        ended = ExitInfo(
            attempt=attempt,
            code=self.exit_code,
            signal=signal,
            duration_seconds=4.0,
            log_tail=self.last_lines,
        )
        return ReplicaObserved(
            replica_id=spec.replica_id,
            generation=spec.generation,
            state=self._state(spec, member),
            attempt=attempt,
            last_exit=ended if self.died else None,
            pid=4242 if self.running else None,
            address="127.0.0.1:41000" if is_head else "",
            rendezvous="127.0.0.1:41001" if is_head else "",
            member_number=member.number,
            epoch=member.epoch,
        )

    def _state(self, spec: ReplicaSpec, member: GangMember) -> ObservedState:
        if self.running:
            return ObservedState.LOADING if self.is_stuck else ObservedState.READY
        if spec.wanted is not WantedState.RUN:
            return ObservedState.STOPPED
        return ObservedState.FAILED if member.epoch in self.launched else ObservedState.WAITING


class GangFleet:
    """Nodes of two supernodes, and a deployment whose replicas take two of them each."""

    def __init__(self, leader: Leader, client: redis.Redis, *, nodes: int = 4, in_each: int = 2) -> None:
        self.leader = leader
        self.nodes = [
            GangNode(
                ScriptedNode(
                    client,
                    name=f"n{number}",
                    engines=("vllm",),
                    labels={"supernode": f"s{number // in_each}", "rack": f"r{number // in_each}"},
                )
            )
            for number in range(nodes)
        ]
        for one in self.nodes:
            one.node.enrol()
            one.node.say_hello()
        leader.work()

    def deploy(self, *, replicas: int = 1, nodes_per_replica: int = 2, **changes: int) -> Deployment:
        model, _ = Model.objects.get_or_create(
            name="tiny", defaults={"digest": "sha256:0", "source": "file:///m"}
        )
        wish = DeploymentWish(
            name="wide",
            model_id=model.pk,
            replicas=replicas,
            engine="vllm",
            engine_options={"tensor_parallel_size": nodes_per_replica},
            replica_memory_bytes=GIB,
            nodes_per_replica=nodes_per_replica,
            **changes,
        )
        return create_deployment(wish, actor="user:test", now=NOW)

    def round(self, *silent: str) -> None:
        """Nodes hear, act and report, but those that are silent; then the leader looks."""
        for one in self.nodes:
            if one.node.name not in silent:
                one.take_in()
                one.report()
        self.leader.work()

    def rounds(self, count: int, *silent: str) -> None:
        for _ in range(count):
            self.round(*silent)

    def until(self, status: str, *silent: str, rounds: int = 12) -> Replica:
        """Go on until the oldest replica that is left has a status."""
        for _ in range(rounds):
            replica = Replica.objects.exclude(status="stopped").order_by("created_at", "name").first()
            if replica is not None and replica.status == status:
                return replica
            self.round(*silent)
        found = list(Replica.objects.values_list("name", "status", "reason"))
        raise AssertionError(f"no replica is {status} after {rounds} rounds: {found}")

    def of(self, replica: Replica) -> list[GangNode]:
        """Nodes of its members, in order."""
        names = list(replica.members.order_by("number").values_list("node__name", flat=True))
        return [next(one for one in self.nodes if one.node.name == name) for name in names]
