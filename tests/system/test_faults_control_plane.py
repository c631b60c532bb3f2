"""Stores and controllers fail under a running fleet: nobody dies of it, and nothing is done twice."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable

import pytest
import redis

from exaserve_ops.adapters.route_table import LEADER_KEY
from exaserve_ops.audit.models import Event
from exaserve_ops.health.domain.incident import CONFIRMED, MASS_SILENCE, OBSERVER_AWAY, OPEN, RESOLVED
from exaserve_ops.health.models import Incident, LeaderLease
from exaserve_ops.health.selectors import healing_freeze
from exaserve_ops.health.services.incidents import confirm_incident
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.services.deployments import scale_deployment
from tests.fakes.control_plane import ControlPlane, PaperNodes, deploy, seconds_until
from tests.fakes.front_door import FrontDoor, Visitors, refused
from tests.fakes.node import wait_for
from workers.simulation.faults import ClockJump

pytestmark = [
    pytest.mark.system,
    pytest.mark.outage,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300),
]

TAKE_OVER_SECONDS = 3.0
STARTUP_ALLOWANCE_SECONDS = 2.0
"""Two cores, many processes: what a busy machine may add."""
SESSIONS = [f"session-{number}" for number in range(12)]


def ready(deployment: Deployment) -> int:
    return Replica.objects.filter(deployment=deployment, status="ready").count()


def deaths() -> int:
    return Event.objects.filter(event="lost").count()


def stay_for(seconds: float) -> None:
    """Let time pass that is itself the fault."""
    time.sleep(seconds)


def served(plane: ControlPlane, deployment: Deployment, replicas: int) -> FrontDoor:
    """Wait until the deployment is ready and a gateway serves it."""
    wait_for(lambda: ready(deployment) == replicas, f"{replicas} ready replicas", seconds=60)
    door = plane.open_door("paper")
    door.wait_until_serving()
    return door


def assert_nothing_was_done_twice(nodes: PaperNodes, replicas: int) -> None:
    """Every replica was made once, told of once, launched once, and is in one place."""
    made = Counter(Event.objects.filter(event="created", subject_kind="replica").values_list("subject_id"))
    placed = Counter(Event.objects.filter(event="place", subject_kind="replica").values_list("subject_id"))
    assert sorted(made.values()) == [1] * replicas
    assert sorted(placed.values()) == [1] * replicas
    assert sorted(nodes.launches().values()) == [1] * replicas
    assert {len(where) for where in nodes.places().values()} == {1}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_spare_takes_over_and_the_old_leader_does_nothing_more(
    plane: ControlPlane,
    nodes: PaperNodes,
    redis_client: redis.Redis,
    stay_away: Callable[[], None],
    end: signal.Signals,
) -> None:
    old = plane.start_leader()
    spare = plane.start()
    nodes.start()
    deployment = deploy(3)
    visitors = Visitors(served(plane, deployment, 3), SESSIONS)
    wait_for(lambda: "waiting_for_lead" in spare.log.read_text(), "the spare to be up", seconds=40)
    epoch = LeaderLease.objects.get().epoch
    old.signal(end)
    took = seconds_until(spare.leads, "the spare to lead", seconds=20)
    assert took < TAKE_OVER_SECONDS + STARTUP_ALLOWANCE_SECONDS
    scale_deployment(deployment.pk, replicas=5, actor="user:test", now=clock.now())
    wait_for(lambda: ready(deployment) == 5, "five ready replicas", seconds=60)
    if end == signal.SIGSTOP:
        stay_away()
        old.signal(signal.SIGCONT)
        assert wait_for(old.process.poll, "the old leader to end", seconds=30) == 1
    assert LeaderLease.objects.get().epoch == int(redis_client.get(LEADER_KEY)) == epoch + 1
    assert spare.leads()
    hands = Event.objects.filter(event="leader_changed").order_by("pk")
    assert list(hands.values_list("generation", flat=True)) == [epoch, epoch + 1]
    assert hands[1].reason.startswith("nobody led for ")
    assert_nothing_was_done_twice(nodes, 5)
    assert deaths() == 0
    assert set(nodes.liveness().values()) == {"alive"}
    assert refused(visitors.leave()) == []


def test_redis_away_kills_nobody_and_is_told(
    plane: ControlPlane, nodes: PaperNodes, stay_away: Callable[[], None]
) -> None:
    leader = plane.start_leader()
    nodes.start()
    deployment = deploy(3)
    door = served(plane, deployment, 3)
    visitors = Visitors(door, SESSIONS)
    wait_for(lambda: visitors.count() > len(SESSIONS), "every session to have had a turn")
    plane.redis.cut()
    wait_for(healing_freeze, "healing to be frozen", seconds=20)
    wait_for(door.is_stale, "the gateway to call its table stale", seconds=20)
    stay_away()
    before = visitors.count()
    wait_for(lambda: visitors.count() > before + len(SESSIONS), "chats while the store is away", seconds=30)
    plane.redis.mend()
    incident = wait_for(
        lambda: Incident.objects.filter(kind=OBSERVER_AWAY, status=RESOLVED).first(),
        "the incident to resolve",
        seconds=40,
    )
    assert incident.evidence.startswith("no report could be read for")
    wait_for(lambda: set(nodes.liveness().values()) == {"alive"}, "all to be alive", seconds=20)
    assert deaths() == 0
    assert not healing_freeze()
    assert ready(deployment) == 3
    wait_for(lambda: not door.is_stale(), "the gateway's table to be fresh again", seconds=20)
    scale_deployment(deployment.pk, replicas=4, actor="user:test", now=clock.now())
    wait_for(lambda: ready(deployment) == 4, "a fourth replica", seconds=40)
    assert refused(visitors.leave()) == []
    assert_nothing_was_done_twice(nodes, 4)
    assert Incident.objects.count() == 1
    assert leader.process.poll() is None
    assert leader.leads()


@pytest.mark.parametrize("how", ["cut", "hold"])
def test_postgres_away_kills_nobody_and_needs_no_restart(
    plane: ControlPlane, nodes: PaperNodes, stay_away: Callable[[], None], how: str
) -> None:
    leader = plane.start_leader()
    nodes.start()
    deployment = deploy(2)
    door = served(plane, deployment, 2)
    visitors = Visitors(door, SESSIONS)
    getattr(plane.postgres, how)()
    stay_away()
    assert not door.is_stale(), "gateways need no Postgres"
    plane.postgres.mend()
    scale_deployment(deployment.pk, replicas=3, actor="user:test", now=clock.now())
    wait_for(lambda: ready(deployment) == 3, "a third replica", seconds=60)
    assert refused(visitors.leave()) == []
    assert_nothing_was_done_twice(nodes, 3)
    assert deaths() == 0
    assert set(nodes.liveness().values()) == {"alive"}
    assert leader.process.poll() is None
    assert leader.leads()
    assert LeaderLease.objects.get().epoch == 1


def test_node_that_dies_while_postgres_is_away_is_dead_soon_after_and_nobody_else(
    plane: ControlPlane, nodes: PaperNodes, stay_away: Callable[[], None]
) -> None:
    plane.start_leader()
    nodes.start()
    deployment = deploy(6)
    wait_for(lambda: ready(deployment) == 6, "six ready replicas", seconds=60)
    plane.postgres.cut()
    nodes.silence(["sim-2"])
    stay_away()
    assert deaths() == 0
    plane.postgres.mend()
    wait_for(lambda: nodes.liveness()["sim-2"] == "dead", "the verdict", seconds=30)
    wait_for(lambda: ready(deployment) == 6, "its replica to be healed elsewhere", seconds=60)
    assert Counter(nodes.liveness().values()) == {"alive": 5, "dead": 1}
    assert deaths() == 1


def test_mass_silence_kills_nobody_until_somebody_says_so(plane: ControlPlane, nodes: PaperNodes) -> None:
    plane.start_leader()
    nodes.start()
    silent = nodes.names[:5]
    nodes.silence(silent)
    incident = wait_for(
        lambda: Incident.objects.filter(kind=MASS_SILENCE, status=OPEN).first(), "an incident", seconds=20
    )
    wait_for(lambda: list(nodes.liveness().values()).count("suspect") == 5, "five suspects", seconds=20)
    stay_for(5)
    assert deaths() == 0
    assert healing_freeze()
    nodes.restore(silent)
    wait_for(lambda: set(nodes.liveness().values()) == {"alive"}, "all to be alive", seconds=30)
    wait_for(lambda: not healing_freeze(), "healing to go on", seconds=30)
    incident.refresh_from_db()
    assert (incident.status, incident.resolution) == (RESOLVED, "all 5 nodes report again")
    nodes.silence(silent)
    again = wait_for(
        lambda: Incident.objects.filter(kind=MASS_SILENCE, status=OPEN).first(), "an incident", seconds=20
    )
    confirm_incident(again.pk, reason="the power is off", actor="user:test", now=clock.now())
    wait_for(lambda: list(nodes.liveness().values()).count("dead") == 5, "five dead nodes", seconds=20)
    wait_for(lambda: Incident.objects.get(pk=again.pk).applied_at, "the incident to be carried out")
    assert Incident.objects.get(pk=again.pk).status == CONFIRMED


def test_one_death_is_found_out_in_time_and_the_node_comes_back_under_a_new_lease(
    plane: ControlPlane, nodes: PaperNodes
) -> None:
    plane.start_leader()
    nodes.start()
    wait_for(lambda: nodes.epoch("sim-2") == 1, "the node's first lease")
    nodes.silence(["sim-2"])
    took = seconds_until(lambda: nodes.liveness()["sim-2"] == "dead", "the death", seconds=20)
    assert took <= 4.0 + STARTUP_ALLOWANCE_SECONDS
    assert not healing_freeze()
    nodes.restore(["sim-2"])
    wait_for(lambda: nodes.liveness()["sim-2"] == "alive", "the return", seconds=20)
    wait_for(lambda: nodes.epoch("sim-2") == 2, "the node's new lease", seconds=20)
    events = Event.objects.filter(subject_name="sim-2", event__in=("missed", "lost", "recovered"))
    assert list(events.order_by("pk").values_list("event", flat=True)) == ["missed", "lost", "recovered"]


def test_clocks_that_are_ten_minutes_off_are_shown_and_change_nothing(plane: ControlPlane) -> None:
    off = [
        ClockJump(nodes=("sim-0",), offset_seconds=600.0),
        ClockJump(nodes=("sim-1",), offset_seconds=-600.0),
    ]
    nodes = PaperNodes(plane.redis_url, count=3, faults=off)
    plane.start_leader()
    try:
        nodes.start()

        def skews() -> list[int] | None:
            found = Node.objects.order_by("name").values_list("clock_skew_seconds", flat=True)
            return None if None in list(found) else [round(value or 0) for value in found]

        wait_for(lambda: skews() is not None and abs((skews() or [0])[0]) > 300, "skews", seconds=20)
        assert [round(value, -1) for value in skews() or []] == [600, -600, 0]
        stay_for(5)
        assert set(nodes.liveness().values()) == {"alive"}
        assert not Event.objects.filter(event__in=("missed", "lost")).exists()
    finally:
        nodes.stop()
