"""Rollouts to weights on nodes' own disks: brought ahead of each wave, the old ones kept until the end."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

from exaserve_ops.controllers.rollouts import RolloutDriver
from exaserve_ops.inventory.models import FailureDomain, Node
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.management.simulated.serving import ensure_stored_models, facts_of_stored_model
from exaserve_ops.rollouts.models import Rollout
from exaserve_ops.rollouts.services.rollouts import checked_policy, create_rollout, preview_rollout
from exaserve_ops.rollouts.services.weights import look_at_weights
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment
from exaserve_ops.serving.services.models import register_model
from exaserve_ops.serving.services.releases import ReleaseWish
from exaserve_ops.serving.services.weights import change_storage, want_weights
from exaserve_ops.weights.models import NodeWeights, WeightsClaim
from tests.fakes.fleet import FLEET_SECRET
from tests.fakes.leader import Leader, leading
from workers.protocol import names
from workers.protocol.digests import node_key
from workers.simulation.fleet import SimulatedFleet
from workers.simulation.identity import ENGINE, NodeIdentity
from workers.simulation.node import NodeShape
from workers.simulation.weights import StoreShape
from workers.weights.planning import StorePolicy

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(240)]

NODES = 2
TURN_SECONDS = 3.0
GB = 10**9
QUICK: dict[str, Any] = {
    "canary_soak_seconds": 0,
    "soak_seconds": 0,
    "min_requests": 0,
    "sessions_wait_seconds": 0,
    "max_surge": "1",
    "growth": ["1"],
}
STORE = StoreShape(
    policy=StorePolicy(margin_bytes=GB),
    disk_bytes=30 * GB,
    link_bytes_per_second=2 * GB,
    origin_bytes_per_second=2 * GB,
)


@dataclass
class StoredStage:
    """Simulated nodes that keep weights, in their own time, under a leader over real stores."""

    leader: Leader
    client: redis.Redis
    identities: list[NodeIdentity] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in range(NODES):
            node_id = str(uuid.uuid4())
            identity = NodeIdentity(
                name=f"sim-{number}",
                node_id=node_id,
                node_key=node_key(FLEET_SECRET, node_id, 1).hex(),
                rack="rack-1",
                supernode="s",
                address=f"127.101.0.{number + 1}",
            )
            domain = FailureDomain.objects.create(kind="host", name=identity.name)
            Node.objects.create(pk=node_id, name=identity.name, failure_domain=domain, simulated=True)
            self.identities.append(identity)
        self.now = time.monotonic()
        self.fleet = SimulatedFleet(
            self.identities,
            shape=NodeShape(slots=2, store=STORE),
            seed=1,
            now=self.now,
            wall_offset_seconds=clock.unix_seconds() - self.now,
        )
        self.driver = RolloutDriver(self.leader.queue)

    def turn(self) -> None:
        """A few seconds of the nodes, and a look of everybody else."""
        self.now += TURN_SECONDS
        for report in self.fleet.step(self.now):
            self.client.xadd(names.REPORT_STREAM, {"m": report})
        self.leader.work()
        self.driver.step()
        self.leader.drain()
        self.leader.weights.step()
        for identity in self.identities:
            queue = names.node_queue(identity.node_id)
            while (raw := self.client.rpop(queue)) is not None:
                body = json.loads(base64.b64decode(json.loads(raw)["body"]))
                self.fleet.take(identity.node_id, base64.b64decode(body[0][0]), self.now)

    def until(self, condition: Callable[[], object], what: str, *, turns: int = 150) -> None:
        for _ in range(turns):
            if condition():
                return
            self.turn()
        rows = Replica.objects.exclude(status="stopped").values_list("name", "status", "reason")
        raise AssertionError(
            f"not after {turns} turns: {what}; {list(rows)}, {list(Rollout.objects.values())}"
        )


@pytest.fixture
def stage(redis_client: redis.Redis) -> Iterator[StoredStage]:
    with leading(redis_client) as leader:
        stage = StoredStage(leader, redis_client)
        for _ in range(3):
            stage.turn()
        yield stage


def stored(gigabytes: int) -> Model:
    ensure_stored_models((gigabytes,))
    return Model.objects.get(name=f"simulated-weights-{gigabytes}gb")


def deploy(stage: StoredStage, model: Model, *, nodes_per_replica: int = 1) -> Deployment:
    replicas = NODES // nodes_per_replica
    wish = DeploymentWish(
        name="chat",
        model_id=model.pk,
        replicas=replicas,
        engine=ENGINE,
        nodes_per_replica=nodes_per_replica,
        replica_memory_bytes=40 << 30,
        drain_seconds=5,
    )
    deployment = create_deployment(wish, actor="test", now=clock.now())
    ready = Replica.objects.filter(deployment=deployment, status="ready")
    stage.until(lambda: ready.count() == replicas, "all replicas serve")
    return deployment


def roll(deployment: Deployment, model: Model, **policy: Any) -> Rollout:
    wish, chosen, now = ReleaseWish(model_id=model.pk), checked_policy(QUICK | policy), clock.now()
    plan = preview_rollout(deployment.pk, wish, chosen, actor="test", now=now)
    assert plan.refusals == ()
    return create_rollout(
        deployment.pk, wish, chosen, reason="new weights", confirmed=plan.digest, actor="test", now=now
    )


def status_of(rollout: Rollout) -> str:
    return Rollout.objects.values_list("status", flat=True).get(pk=rollout.pk)


def test_new_weights_are_brought_wave_by_wave_from_one_another_and_the_old_ones_stay_until_the_end(
    stage: StoredStage,
) -> None:
    old, new = stored(10), stored(12)
    deployment = deploy(stage, old)
    rollout = roll(deployment, new)
    launched_without: list[str] = []

    def is_done() -> bool:
        whole = set(
            NodeWeights.objects.filter(revision=new.digest, state="ready").values_list("node", flat=True)
        )
        started = Replica.objects.filter(release__model=new, status__in=["starting", "loading", "ready"])
        launched_without.extend(r.name for r in started if r.node_id not in whole)
        if status_of(rollout) == "running":
            kept = WeightsClaim.objects.filter(revision=old.digest, owner=f"rollout:{rollout.pk}")
            assert kept.count() == NODES, "the way back is short until it has ended"
        return status_of(rollout) == "done"

    stage.until(is_done, "the rollout is done")
    assert launched_without == []
    rows = NodeWeights.objects.filter(revision=new.digest)
    assert [row.state for row in rows] == ["ready"] * NODES
    from_origin = sum(count for row in rows for kind, _, count in row.sources if kind != "peer")
    assert from_origin < 1.6 * new.weights_bytes, "the canary's node gives it to the others"
    assert not WeightsClaim.objects.exists(), "nothing is pinned any more"
    # Old weights make room for what is wanted next.
    third = stored(15)
    node = rows[0].node_id
    want_weights(third.pk, [node], owner="person", actor="test", now=clock.now(), reason="next")
    here = NodeWeights.objects.filter(node=node)
    stage.until(
        lambda: here.filter(revision=third.digest, state="ready").exists(), "the next weights have come"
    )
    assert not here.filter(revision=old.digest).exists()
    assert here.get(revision=new.digest).in_use


def test_weights_are_brought_to_the_nodes_of_all_members_before_a_wave_and_kept_there(
    stage: StoredStage,
) -> None:
    old, new = stored(10), stored(12)
    deployment = deploy(stage, old, nodes_per_replica=NODES)
    everywhere = {identity.name for identity in stage.identities}
    assert set(look_at_weights(new, deployment.pk).bytes_to_bring) == everywhere
    rollout = roll(deployment, new)
    claims = WeightsClaim.objects.filter(owner=f"rollout:{rollout.pk}")
    claimed_on = {old.digest: 0, new.digest: 0}

    def is_done() -> bool:
        for digest, most in claimed_on.items():
            claimed_on[digest] = max(most, claims.filter(revision=digest).count())
        return status_of(rollout) == "done"

    stage.until(is_done, "the rollout is done")
    assert claimed_on == {old.digest: NODES, new.digest: NODES}


def test_disk_without_room_forbids_it_before_it_begins_and_what_may_be_evicted_counts_as_room(
    stage: StoredStage,
) -> None:
    old, large = stored(10), stored(25)
    deployment = deploy(stage, old)
    chosen, now = checked_policy(QUICK), clock.now()
    plan = preview_rollout(deployment.pk, ReleaseWish(model_id=large.pk), chosen, actor="test", now=now)
    assert "No room on disk for its weights" in plan.refusals[0]
    # Something that nobody wants any more fills the disks: it goes, and so forbids nothing.
    spare, fits = stored(14), stored(16)
    nodes = list(Node.objects.values_list("pk", flat=True))
    want_weights(spare.pk, nodes, owner="person", actor="test", now=now, reason="was needed")
    there = NodeWeights.objects.filter(revision=spare.digest, state="ready")
    stage.until(lambda: there.count() == NODES, "the disks are full")
    WeightsClaim.objects.filter(revision=spare.digest).delete()
    for _ in range(3):
        stage.turn()
    plan = preview_rollout(deployment.pk, ReleaseWish(model_id=fits.pk), chosen, actor="test", now=now)
    assert plan.refusals == ()
    rollout = roll(deployment, fits)
    stage.until(lambda: status_of(rollout) == "done", "the rollout is done")
    assert not NodeWeights.objects.filter(revision=spare.digest).exists()


def test_same_bytes_go_from_in_place_to_nodes_disks_by_a_rollout(stage: StoredStage) -> None:
    stored_one = stored(10)
    in_place = register_model(
        name="simulated-in-place", facts=facts_of_stored_model(10), actor="test", now=clock.now()
    )
    assert in_place.digest == stored_one.digest
    deployment = deploy(stage, in_place)
    with pytest.raises(ConflictError, match="register its folder under another name"):
        change_storage(in_place.pk, storage="node", actor="test", now=clock.now())
    rollout = roll(deployment, stored_one)
    stage.until(lambda: status_of(rollout) == "done", "the rollout is done")
    ready = Replica.objects.filter(status="ready", wanted="run")
    assert {r.release.model.storage for r in ready} == {"node"}
    whole = NodeWeights.objects.filter(state="ready").values_list("node", flat=True)
    assert set(ready.values_list("node", flat=True)) <= set(whole)
