"""Standbys that sleep, as the control plane has them: who is told to, who may be asked, who is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import pytest
import redis
from django.test import Client
from django.urls import reverse

from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.routing.selectors import routes
from exaserve_ops.serving.domain.reach import REACHED, WAITING, ReachVerdict
from exaserve_ops.serving.domain.sleep import SleepWish, is_to_sleep, refusal
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.selectors import deployments_with_counts, wanted_of_node
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment, update_deployment
from exaserve_ops.serving.services.handover import record_handover
from exaserve_ops.serving.services.healing import Promotion, promote_standbys, stand_down
from exaserve_ops.serving.services.reach import record_reach
from exaserve_ops.serving.services.sleep import nodes_of_awake_standbys
from exaserve_ops.sessions.selectors.moves import takes_sessions
from tests.dashboard.conftest import MemoryReader
from tests.fakes.fleet import GIB, seen
from tests.fakes.leader import leading
from tests.fakes.scripted_fleet import Fleet
from tests.fakes.world import client_with_key, make_user
from workers.protocol import v1
from workers.protocol.engines.sleeping import ASLEEP, AWAKE, WAKING
from workers.protocol.observed import ObservedState, ReplicaObserved

pytestmark = pytest.mark.django_db

ABLE = {"enable_sleep_mode": True}


class SleepyFleet(Fleet):
    """Agents that put to sleep whom they are told to, and wake them when the test lets them."""

    elders: set[UUID] | None = None
    """If said, all others load for ever."""

    def beat(self) -> None:
        self.told = getattr(self, "told", {})
        self.sleep = getattr(self, "sleep", {})
        for node in self.nodes:
            wishes = [c for c in node.commands() if isinstance(c, v1.ApplyDesired)]
            for wish in wishes:
                self.told |= {spec.replica_id: spec.asleep for spec in wish.replicas}
            if node.node_id in self.silent:
                continue
            rows = Replica.objects.filter(node=node.node_id).exclude(status="stopped").order_by("name")
            node.beat(*(self._with_sleep(self._sighting(row)) for row in rows))

    def _sighting(self, row: Replica) -> ReplicaObserved:
        if self.elders is not None and row.wanted == "run" and row.pk not in self.elders:
            return seen(row, ObservedState.LOADING)
        return super()._sighting(row)

    def _with_sleep(self, sighting: ReplicaObserved) -> ReplicaObserved:
        known = sighting.replica_id
        if sighting.state is not ObservedState.READY:
            self.sleep[known] = AWAKE
            return sighting
        if self.told.get(known):
            self.sleep[known] = ASLEEP
        elif self.sleep.get(known) == ASLEEP:
            self.sleep[known] = WAKING
        return ReplicaObserved(
            **{name: getattr(sighting, name) for name in ("replica_id", "generation", "state", "attempt")},
            address=sighting.address,
            ports=sighting.ports,
            pid=sighting.pid,
            sleep_state=self.sleep.get(known, AWAKE),
            woke_in_seconds=2.5 if known in self.sleep and self.sleep[known] == AWAKE else None,
        )


@pytest.fixture
def fleet(redis_client: redis.Redis) -> Iterator[SleepyFleet]:
    with leading(redis_client) as leader:
        yield SleepyFleet(leader, redis_client, 3)


def deploy(engine_options: dict[str, object] | None = None, **changes: object) -> Deployment:
    model, _ = Model.objects.get_or_create(
        name="tiny", defaults={"digest": "sha256:0", "source": "file:///m"}
    )
    wish = DeploymentWish(
        name="chat",
        model_id=model.pk,
        replicas=1,
        engine="simulated",
        engine_options=ABLE if engine_options is None else engine_options,
        replica_memory_bytes=GIB,
        standbys=1,
        standbys_sleep=True,
    )
    wish = replace(wish, **changes)  # type: ignore[arg-type]  # fields by name
    return create_deployment(wish, actor="user:test", now=clock.now())


def one(role: str) -> Replica:
    return Replica.objects.get(role=role, wanted="run")


def lose(fleet: SleepyFleet, replica: Replica) -> None:
    """Take its node away; what is made for it since loads for as long as the test takes."""
    fleet.elders = set(Replica.objects.values_list("pk", flat=True))
    fleet.leader.lose(str(replica.node_id))
    fleet.silent.add(str(replica.node_id))


def events_of(replica: Replica) -> list[str]:
    return list(
        Event.objects.filter(subject_id=str(replica.pk)).order_by("pk").values_list("event", flat=True)
    )


def test_a_sleeper_is_a_ready_standby_and_is_routed_to_only_once_it_is_awake(fleet: SleepyFleet) -> None:
    deployment = deploy()
    fleet.settle()
    standby, victim = one("standby"), one("serving")
    assert (standby.status, standby.sleep_state) == ("ready", ASLEEP)
    assert (victim.sleep_state, fleet.told[str(victim.pk)]) == (AWAKE, False)
    counted = deployments_with_counts().get(pk=deployment.pk)
    assert (counted.standby_ready_count, counted.standby_asleep_count, counted.ready_count) == (1, 1, 1)
    assert "fell_asleep" in events_of(standby)

    lose(fleet, victim)
    fleet.settle()
    standby.refresh_from_db()
    assert (standby.role, standby.sleep_state) == ("serving", WAKING)
    assert not fleet.told[str(standby.pk)], "its agent was told without waiting for the next resync"
    route = routes()[str(standby.pk)]
    assert route.sleeps, "gateways connect ahead, and send nobody there for all that"
    assert not route.reached
    assert not takes_sessions(standby)
    assert deployments_with_counts().get(pk=deployment.pk).ready_count == 0
    [promotion] = Event.objects.filter(event="promoted")
    assert promotion.reason.endswith("this standby is woken")

    fleet.sleep[str(standby.pk)] = AWAKE
    fleet.settle()
    standby.refresh_from_db()
    assert (standby.sleep_state, standby.sleep_since, standby.woke_in_seconds) == (AWAKE, None, 2.5)
    assert (routes()[str(standby.pk)].reached, routes()[str(standby.pk)].sleeps) == (True, False)
    assert Event.objects.get(event="woke").reason == "in 2.5 s"


def test_one_that_does_not_wake_makes_way_for_the_next_standby(fleet: SleepyFleet) -> None:
    deploy(standbys=2)
    fleet.settle()
    victim = one("serving")
    lose(fleet, victim)
    fleet.settle()
    woken = one("serving")
    assert woken.sleep_state == WAKING
    fleet.states[str(woken.pk)] = seen(woken, ObservedState.BACKING_OFF, reason="did not wake within 60 s")
    fleet.settle()
    second = one("serving")
    assert second.pk not in (woken.pk, victim.pk)
    woken.refresh_from_db()
    assert (woken.role, woken.sleep_state) == ("standby", AWAKE)
    assert "woke" not in events_of(woken)


def test_one_that_is_ready_again_before_the_sleeper_is_awake_serves_on(fleet: SleepyFleet) -> None:
    deploy()
    fleet.settle()
    crashed, sleeper = one("serving"), one("standby")
    fleet.states[str(crashed.pk)] = seen(crashed, ObservedState.BACKING_OFF, reason="killed")
    fleet.settle()
    assert (one("serving").pk, one("serving").sleep_state) == (sleeper.pk, WAKING)
    del fleet.states[str(crashed.pk)]
    fleet.settle()
    assert one("serving").pk == crashed.pk, "it answers, and the other one does not yet"
    assert "fell_asleep" not in events_of(crashed)
    assert routes()[str(crashed.pk)].reached
    back = Event.objects.filter(event="promoted").latest("pk")
    assert back.reason == f"{sleeper.name} is not awake yet; this standby is"
    sleeper.refresh_from_db()
    assert (sleeper.role, sleeper.sleep_state) == ("standby", ASLEEP)


def test_an_awake_standby_is_put_to_sleep_only_once_those_that_serve_are_reached(fleet: SleepyFleet) -> None:
    deploy()
    fleet.settle()
    serving, standby = one("serving"), one("standby")

    def is_told_to_sleep() -> bool:
        assert standby.node_id is not None
        wishes = {wish.replica_id: wish for wish in wanted_of_node(standby.node_id)}
        return wishes[str(standby.pk)].asleep

    Replica.objects.filter(pk=serving.pk).update(reach=WAITING)
    assert is_told_to_sleep(), "who sleeps already sleeps on"
    Replica.objects.filter(pk=standby.pk).update(sleep_state=AWAKE)
    assert not is_told_to_sleep()
    record_reach({serving.pk: ReachVerdict(REACHED)}, actor="system:test", now=clock.now())
    assert is_told_to_sleep()
    hints = nodes_of_awake_standbys([serving.deployment_id])
    assert hints == [("node", standby.node_id)], "its agent is told without waiting for the next resync"


def test_a_promotion_that_was_overtaken_changes_nothing(fleet: SleepyFleet) -> None:
    deploy()
    fleet.settle()
    serving, standby = one("serving"), one("standby")
    late = [Promotion(standby.pk, serving.pk, "it was gone")]
    assert promote_standbys(late, actor="system:test", now=clock.now()) == [
        f"{serving.name} serves, or is replaced already"
    ]
    Replica.objects.filter(pk=serving.pk).update(sleep_state=WAKING)
    [why] = promote_standbys(late, actor="system:test", now=clock.now())
    assert "would answer no sooner" in why
    assert (one("serving").pk, one("standby").pk) == (serving.pk, standby.pk)


def test_an_awake_standby_is_taken_before_one_that_sleeps(fleet: SleepyFleet) -> None:
    deployment = deploy(standbys=2)
    fleet.settle()
    sleepers = list(Replica.objects.filter(role="standby").order_by("-created_at", "-name"))
    last = str(sleepers[0].pk)
    Replica.objects.filter(pk=last).update(sleep_state=AWAKE)
    lose(fleet, one("serving"))
    fleet.leader.reconcilers.ring("deployment", str(deployment.pk))  # as the doorbell does
    fleet.leader.drain()
    assert str(one("serving").pk) == last


def test_standbys_are_woken_when_they_are_to_stay_awake(fleet: SleepyFleet) -> None:
    deployment = deploy()
    fleet.settle()
    standby = one("standby")
    update_deployment(deployment.pk, {"standbys_sleep": False}, actor="user:test", now=clock.now())
    fleet.settle()
    assert not fleet.told[str(standby.pk)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"standbys_sleep": False}, False),
        ({"stands_by": False}, False),
        ({"options": {}}, False),
        ({"is_relied_on": True}, False),
        ({"engine": "torch"}, False),
        ({"engine": "vllm"}, True),
        ({"engine": "sglang"}, False),
        ({"engine": "sglang", "options": {"enable_memory_saver": True}}, True),
    ],
)
def test_only_standbys_whose_own_release_can_are_to_sleep(changes: dict[str, object], expected: bool) -> None:
    wish = SleepWish(standbys_sleep=True, stands_by=True, engine="simulated", options=ABLE)
    assert is_to_sleep(replace(wish, **changes)) is expected  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize(
    ("engine", "options", "why"),
    [
        ("torch", {}, "the built-in engine does not sleep"),
        ("simulated", {}, "only with the option enable_sleep_mode"),
    ],
)
def test_what_cannot_sleep_is_refused_and_nothing_is_made(
    engine: str, options: dict[str, object], why: str
) -> None:
    with pytest.raises(InvalidInputError, match=why):
        deploy(options, engine=engine)
    assert not Deployment.objects.exists()


def test_replica_over_several_nodes_is_refused_to_sleep() -> None:
    assert refusal("vllm", ABLE) == ""
    assert "several nodes run together" in refusal("vllm", ABLE, nodes=2)


def test_sleep_is_asked_for_over_rest_and_seen_there(fleet: SleepyFleet) -> None:
    operator = client_with_key(make_user("olga", "operator"))
    awake = deploy({}, standbys_sleep=False)
    refused = operator.patch(f"/api/v1/deployments/{awake.pk}", {"standbys_sleep": True, "generation": 1})
    assert refused.status_code == 400
    assert "enable_sleep_mode" in str(refused.json())
    able = deploy(name="able", standbys_sleep=False)
    url = f"/api/v1/deployments/{able.pk}"
    assert operator.patch(url, {"standbys_sleep": True, "generation": 1}).json()["standbys_sleep"] is True
    fleet.settle()
    assert operator.get(url).json()["asleep_standbys"] == 1
    sleeper = Replica.objects.get(deployment=able, role="standby")
    rows = operator.get("/api/v1/replicas").json()["results"]
    [body] = [row for row in rows if row["id"] == str(sleeper.pk)]
    assert (body["sleep_state"], body["sleep_note"]) == (ASLEEP, "")
    assert body["sleep_since"] is not None


def test_pages_say_who_sleeps_and_let_operators_wake_them(fleet: SleepyFleet) -> None:
    live_reader.use(MemoryReader())
    operator, viewer = Client(), Client()
    operator.force_login(make_user("otto", "operator"))
    viewer.force_login(make_user("vera", "viewer"))
    deployment = deploy()
    fleet.settle()
    page = reverse("deployment", args=[deployment.pk])
    assert "1 asleep" in viewer.get(page).content.decode()
    state = viewer.get(reverse("replica_state", args=[one("standby").pk])).content.decode()
    assert "stays promised to it" in state
    address = reverse("deployment_sleep", args=[deployment.pk])
    assert viewer.post(address, {"sleep": "no", "reason": "x"}).status_code == 403
    assert "Say why" in operator.post(address, {"sleep": "no"}, follow=True).content.decode()
    answer = operator.post(address, {"sleep": "no", "reason": "a busy night"}, follow=True).content.decode()
    assert "are woken, and stay awake" in answer
    assert Event.objects.get(event="changed").reason == "standbys_sleep on to off: a busy night"
    Deployment.objects.filter(pk=deployment.pk).update(engine_options={})
    refused = operator.post(address, {"sleep": "yes", "reason": "quiet"}, follow=True).content.decode()
    assert "Not done" in refused


def test_a_sleeper_is_woken_where_one_more_is_to_serve_and_one_less_to_stand_by(fleet: SleepyFleet) -> None:
    deployment = deploy()
    fleet.settle()
    sleeper, before = one("standby"), Replica.objects.count()
    update_deployment(deployment.pk, {"replicas": 2, "standbys": 0}, actor="user:test", now=clock.now())
    fleet.settle()
    sleeper.refresh_from_db()
    assert (sleeper.role, sleeper.status, sleeper.sleep_state) == ("serving", "ready", WAKING)
    assert not fleet.told[str(sleeper.pk)]
    assert Replica.objects.count() == before


def test_one_that_stands_down_is_put_to_sleep_once_its_conversations_have_left(fleet: SleepyFleet) -> None:
    deployment = deploy(replicas=2, standbys=0)
    fleet.settle()
    fallen = Replica.objects.order_by("name").first()
    assert fallen is not None
    assert fallen.node_id is not None
    Deployment.objects.filter(pk=deployment.pk).update(replicas=1, standbys=1)
    stand_down(fallen.pk, why="fewer are to serve", actor="user:test", now=clock.now())

    def is_told_to_sleep() -> bool:
        assert fallen is not None
        assert fallen.node_id is not None
        return {wish.replica_id: wish.asleep for wish in wanted_of_node(fallen.node_id)}[str(fallen.pk)]

    assert not is_told_to_sleep()
    record_handover(fallen.pk, left_behind=0, reason="no session is left", actor="x", now=clock.now())
    assert is_told_to_sleep()
