"""Stores and controllers fail under a running fleet: nobody dies of it, and nothing is done twice."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

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
from tests.fakes.node import wait_for
from workers.simulation.faults import ClockJump

pytestmark = [
    pytest.mark.system,
    pytest.mark.outage,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300),
]

AWAY_SECONDS = float(os.environ.get("EXAOPS_TEST_AWAY_SECONDS", "8"))
"""A minute in a long run."""
TAKE_OVER_SECONDS = 3.0
STARTUP_ALLOWANCE_SECONDS = 2.0
"""Two cores, many processes: what a busy machine may add."""


@pytest.fixture
def plane(tmp_path: Path, redis_client: object) -> Iterator[ControlPlane]:  # noqa: ARG001 - empties the store
    sockets = Path(tempfile.mkdtemp(prefix="tap-"))
    plane = ControlPlane(tmp_path, sockets)
    try:
        yield plane
    finally:
        plane.end()
        shutil.rmtree(sockets, ignore_errors=True)


@pytest.fixture
def nodes(plane: ControlPlane) -> Iterator[PaperNodes]:
    nodes = PaperNodes(plane.redis_url)
    yield nodes
    nodes.stop()


def ready(deployment: Deployment) -> int:
    return Replica.objects.filter(deployment=deployment, status="ready").count()


def deaths() -> int:
    return Event.objects.filter(event="lost").count()


def stay_for(seconds: float) -> None:
    """Let time pass that is itself the fault."""
    time.sleep(seconds)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_spare_takes_over_and_the_old_leader_does_nothing_twice(
    plane: ControlPlane, nodes: PaperNodes, end: signal.Signals
) -> None:
    old = plane.start_leader()
    spare = plane.start()
    nodes.start()
    deployment = deploy(3)
    wait_for(lambda: ready(deployment) == 3, "three ready replicas", seconds=40)
    wait_for(lambda: "waiting_for_lead" in spare.log.read_text(), "the spare to be up")
    epoch = LeaderLease.objects.get().epoch
    old.signal(end)
    took = seconds_until(spare.leads, "the spare to lead", seconds=20)
    assert took < TAKE_OVER_SECONDS + STARTUP_ALLOWANCE_SECONDS
    assert LeaderLease.objects.get().epoch == epoch + 1
    scale_deployment(deployment.pk, replicas=5, actor="user:test", now=clock.now())
    if end == signal.SIGSTOP:
        old.signal(signal.SIGCONT)
        assert wait_for(old.process.poll, "the old leader to end") == 1
    wait_for(lambda: ready(deployment) == 5, "five ready replicas", seconds=40)
    made = Counter(Event.objects.filter(event="created", subject_kind="replica").values_list("subject_id"))
    assert sorted(made.values()) == [1] * 5
    assert deaths() == 0
    assert set(nodes.liveness().values()) == {"alive"}


def test_redis_away_kills_nobody_and_is_told(plane: ControlPlane, nodes: PaperNodes) -> None:
    leader = plane.start_leader()
    nodes.start()
    deployment = deploy(3)
    wait_for(lambda: ready(deployment) == 3, "three ready replicas", seconds=40)
    plane.redis.cut()
    wait_for(healing_freeze, "healing to be frozen", seconds=20)
    stay_for(AWAY_SECONDS)
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
    scale_deployment(deployment.pk, replicas=4, actor="user:test", now=clock.now())
    wait_for(lambda: ready(deployment) == 4, "a fourth replica", seconds=40)
    assert leader.process.poll() is None


@pytest.mark.parametrize("how", ["cut", "hold"])
def test_postgres_away_kills_nobody_and_needs_no_restart(
    plane: ControlPlane, nodes: PaperNodes, how: str
) -> None:
    leader = plane.start_leader()
    nodes.start()
    deployment = deploy(2)
    wait_for(lambda: ready(deployment) == 2, "two ready replicas", seconds=40)
    getattr(plane.postgres, how)()
    stay_for(AWAY_SECONDS)
    plane.postgres.mend()
    scale_deployment(deployment.pk, replicas=3, actor="user:test", now=clock.now())
    wait_for(lambda: ready(deployment) == 3, "a third replica", seconds=60)
    assert deaths() == 0
    assert set(nodes.liveness().values()) == {"alive"}
    assert leader.process.poll() is None
    assert leader.leads()


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


def test_clocks_that_are_ten_minutes_off_are_shown_and_change_nothing(
    plane: ControlPlane,
    redis_client: object,  # noqa: ARG001 - empties the store
) -> None:
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
