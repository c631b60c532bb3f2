"""Replicas are told to their nodes in turns, over real stores; the record alone says whose turn it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
import redis

from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.audit.models import Event
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.starts import StartLimits
from exaserve_ops.serving.models import Deployment, Replica, StagedStart
from exaserve_ops.serving.selectors import wanted_of_node
from exaserve_ops.serving.selectors.starts import start_facts, start_limits
from exaserve_ops.serving.selectors.weights import known_revisions, wanted_by_node
from exaserve_ops.serving.services.deployments import scale_deployment
from exaserve_ops.serving.services.models import register_model
from exaserve_ops.serving.services.starts import set_start_limits
from exaserve_ops.serving.services.weights import change_storage
from tests.fakes.fleet import GIB, ScriptedNode, make_deployment, seen
from tests.fakes.leader import Leader, leading
from workers.engines.demo_model import make_demo_model
from workers.protocol import v1
from workers.protocol.observed import ObservedState
from workers.protocol.wish import ReplicaSpec, WantedState

pytestmark = pytest.mark.django_db

PER_NODE, PER_FLEET = 2, 5


@dataclass
class Agents:
    """Scripted nodes that launch what they are told, and whose engines get ready when a test says so."""

    client: redis.Redis
    nodes: list[ScriptedNode]
    wishes: dict[str, tuple[ReplicaSpec, ...]] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)

    def beat(self) -> None:
        for node in self.nodes:
            for command in node.commands():
                if isinstance(command, v1.ApplyDesired):
                    self.wishes[node.node_id] = command.replicas
            rows = Replica.objects.in_bulk([UUID(spec.replica_id) for spec in self.specs(node)])
            node.beat(*(self._sight(rows[UUID(s.replica_id)], s) for s in self.specs(node)))

    def specs(self, node: ScriptedNode) -> tuple[ReplicaSpec, ...]:
        return self.wishes.get(node.node_id, ())

    def _sight(self, row: Replica, spec: ReplicaSpec) -> object:
        if spec.wanted is not WantedState.RUN:
            return seen(row, ObservedState.STOPPED)
        if spec.replica_id not in self.ready:
            return seen(row, ObservedState.LOADING)
        port = 41000 + int(row.name.rpartition("-")[2])
        return seen(row, ObservedState.READY, address=f"127.0.0.1:{port}", ports=(port,))

    def loading(self) -> Counter[str]:
        """How many engines of each node are on their way."""
        return Counter(
            node.node_id
            for node in self.nodes
            for spec in self.specs(node)
            if spec.wanted is WantedState.RUN and spec.replica_id not in self.ready
        )

    def finish_loading(self) -> None:
        """All engines that load are ready from now on."""
        self.ready |= {spec.replica_id for node in self.nodes for spec in self.specs(node)}


@pytest.fixture
def agents(redis_client: redis.Redis, leader: Leader) -> Agents:
    nodes = [ScriptedNode(redis_client, name=f"node-{n}", accelerator_bytes=16 * GIB) for n in range(3)]
    for node in nodes:
        node.enrol()
        node.say_hello()
    leader.work()
    limits = StartLimits(per_node=PER_NODE, per_fleet=PER_FLEET)
    set_start_limits(limits, actor="test", now=clock.now(), reason="")
    return Agents(redis_client, nodes)


def work(agents: Agents, leader: Leader) -> None:
    """Everybody says and hears what is new; then no limit is exceeded on any node."""
    for _ in range(2):
        agents.beat()
        leader.work()
    agents.beat()
    loading = agents.loading()
    assert sum(loading.values()) <= PER_FLEET
    assert not loading or max(loading.values()) <= PER_NODE


def events(kind: str) -> list[str]:
    rows = Event.objects.filter(subject_kind=kind).order_by("pk")
    return list(rows.values_list("event", flat=True))


def waiting(deployment: Deployment) -> dict[str, str]:
    rows = Replica.objects.filter(deployment=deployment, start_waits_since__isnull=False, status="placed")
    return dict(rows.values_list("name", "reason"))


def test_all_start_in_turns_and_the_record_says_when_it_began_and_ended(
    agents: Agents, leader: Leader
) -> None:
    deployment = make_deployment(replicas=14)
    work(agents, leader)
    assert sum(agents.loading().values()) == PER_FLEET
    held = waiting(deployment)
    assert len(held) == 9
    assert set(held.values()) <= {
        "waits its turn: 5 of 5 start in the fleet",
        *(f"waits its turn: 2 of 2 start on node-{n}" for n in range(3)),
    }
    assert events("staged_start") == ["began"]
    for _ in range(6):
        agents.finish_loading()
        work(agents, leader)
    assert Replica.objects.filter(deployment=deployment, status="ready").count() == 14
    assert events("staged_start") == ["began", "ended"]
    staged = StagedStart.objects.get()
    assert (staged.replicas, staged.most_waiting) == (14, 9)
    assert staged.waves >= 3
    assert staged.ended_at is not None
    told = Event.objects.get(subject_kind="staged_start", event="ended").reason
    assert told.startswith(f"14 replicas in {staged.waves} waves, ")


def test_another_leader_goes_on_in_the_middle_and_lets_nobody_too_many_go(
    agents: Agents, leader: Leader, redis_client: redis.Redis
) -> None:
    deployment = make_deployment(replicas=12)
    work(agents, leader)
    agents.finish_loading()
    work(agents, leader)
    with leading(redis_client) as other:
        agents.beat()
        for node in agents.nodes:
            node.say_hello()
        for _ in range(6):
            work(agents, other)
            agents.finish_loading()
        work(agents, other)
    assert Replica.objects.filter(deployment=deployment, status="ready").count() == 12
    assert events("staged_start") == ["began", "ended"]


def test_what_starts_alone_starts_at_once_and_is_no_staged_start(agents: Agents, leader: Leader) -> None:
    make_deployment(replicas=1)
    agents.beat()
    leader.work()
    agents.beat()
    assert sum(agents.loading().values()) == 1
    assert events("staged_start") == []
    assert Replica.objects.get().start_allowed_at is not None


def test_start_that_hangs_holds_nobody_up_for_ever(
    agents: Agents, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = make_deployment(replicas=9)
    work(agents, leader)
    assert len(waiting(deployment)) == 4
    hung = set(Replica.objects.filter(start_waits_since=None).values_list("pk", flat=True))
    later = clock.now() + timedelta(seconds=deployment.start_seconds + 60)
    monkeypatch.setattr(clock, "now", lambda: later)
    leader.reconcilers.reconcile("starts", "all")
    assert waiting(deployment) == {}
    let_go = Replica.objects.filter(start_allowed_at=later)
    assert not hung & set(let_go.values_list("pk", flat=True))


def test_one_that_is_let_go_while_it_waits_ends_and_never_starts(agents: Agents, leader: Leader) -> None:
    deployment = make_deployment(replicas=8)
    work(agents, leader)
    assert len(waiting(deployment)) == 3
    scale_deployment(deployment.pk, replicas=5, actor="test", now=clock.now())
    for _ in range(4):
        work(agents, leader)
    left = Replica.objects.filter(deployment=deployment).exclude(status="stopped")
    assert left.count() == 5
    assert waiting(deployment) == {}
    for _ in range(3):
        agents.finish_loading()
        work(agents, leader)
    assert left.filter(status="ready").count() == 5
    assert events("staged_start") == ["began", "ended"]


def test_node_is_told_of_nobody_who_waits_and_fetches_no_weights_for_them(
    agents: Agents, leader: Leader, tmp_path: Path
) -> None:
    make_demo_model(tmp_path / "demo", seed=0)
    model = register_model(
        name="tiny", facts=ModelFolder().read(str(tmp_path / "demo")), actor="test", now=clock.now()
    )
    change_storage(model.pk, storage="node", actor="test", now=clock.now())
    nobody = StartLimits(from_origins=1, per_node=1)
    set_start_limits(nobody, actor="test", now=clock.now(), reason="")
    make_deployment(replicas=3)
    leader.work()
    told = {node.node_id: wanted_of_node(UUID(node.node_id)) for node in agents.nodes}
    wanted = wanted_by_node(known_revisions())
    assert sorted(len(specs) for specs in told.values()) == [0, 0, 1]
    assert {key for key, specs in told.items() if specs} == {key for key, ones in wanted.items() if ones}
    assert Replica.objects.filter(reason="waits for weights: 1 of 1 fetch from an origin").count() == 2
    [starts] = [one for one in start_facts(()).starters if one.waits_since is None]
    assert not starts.in_place


def test_limits_are_checked_recorded_and_take_effect_at_once(agents: Agents, leader: Leader) -> None:
    with pytest.raises(InvalidInputError, match="per_rack"):
        set_start_limits(StartLimits(per_rack=-1), actor="test", now=clock.now(), reason="")
    deployment = make_deployment(replicas=9)
    work(agents, leader)
    assert waiting(deployment)
    wide = StartLimits(per_node=0, per_fleet=0)
    set_start_limits(wide, actor="user:a", now=clock.now(), reason="the network is ours tonight")
    assert start_limits() == wide
    leader.work()
    assert waiting(deployment) == {}
    event = Event.objects.filter(subject_kind="start_rules").latest("pk")
    assert event.reason == "per node 2 → 0, per fleet 5 → 0: the network is ours tonight"
