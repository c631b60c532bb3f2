"""Every kind of fault that a script can name, on the real controllers: each ends as it should.

Clocks that are off and mass silence are in `test_faults_control_plane.py`, real partitions in
`test_faults_partition.py`; here the fault scripts themselves strike, and the record is read.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import redis

from exaserve_ops.adapters.route_table import REPLICAS_KEY
from exaserve_ops.audit.models import Event
from exaserve_ops.health.domain.incident import CONFIRMED, MASS_SILENCE, OPEN, RESOLVED
from exaserve_ops.health.models import Incident, NodeLease
from exaserve_ops.health.selectors import healing_freeze
from exaserve_ops.health.services.incidents import confirm_incident
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Deployment, Replica
from tests.fakes.control_plane import ControlPlane, PaperNodes, deploy
from tests.fakes.node import wait_for

pytestmark = [
    pytest.mark.system,
    pytest.mark.outage,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300),
]

SIGKILL = 9


class Site:
    """A leader, nine nodes in three racks, and a deployment with one replica on each."""

    def __init__(self, plane: ControlPlane, nodes: PaperNodes, redis_client: redis.Redis) -> None:
        self.plane = plane
        self.nodes = nodes
        self._redis = redis_client
        self.leader = plane.start_leader()
        nodes.start()
        introduced = Node.objects.exclude(engines=[])
        wait_for(lambda: introduced.count() == self.replicas, "every introduction", seconds=30)
        self.deployment: Deployment = deploy(self.replicas)
        self.wait_until_whole()

    @property
    def replicas(self) -> int:
        return len(self.nodes.names)

    def is_whole(self) -> bool:
        """As many ready replicas as are wished for, none in between, and all of them routed to."""
        wanted = Replica.objects.filter(deployment=self.deployment, wanted="run")
        ready = {str(pk) for pk in wanted.filter(status="ready").values_list("pk", flat=True)}
        routed = {key.decode() for key in self._redis.hkeys(REPLICAS_KEY)}
        return wanted.count() == len(ready) == self.replicas and routed == ready

    def wait_until_whole(self) -> None:
        wait_for(self.is_whole, f"{self.replicas} ready replicas", seconds=90)

    def replica_on(self, name: str) -> str:
        return str(Replica.objects.get(node__name=name, wanted="run").pk)

    def liveness_is(self, **counts: int) -> bool:
        return Counter(self.nodes.liveness().values()) == counts

    def wait_for_liveness(self, **counts: int) -> None:
        wait_for(lambda: self.liveness_is(**counts), f"{counts}; are {self.nodes.liveness()}", seconds=60)

    @staticmethod
    def happened(*names: str) -> list[tuple[str, str]]:
        """Node and event, in order."""
        rows = Event.objects.filter(subject_kind="node", event__in=names).order_by("pk")
        return list(rows.values_list("subject_name", "event"))


@pytest.fixture
def site(plane: ControlPlane, redis_client: redis.Redis) -> Iterator[Site]:
    nodes = PaperNodes(plane.redis_url, count=9, racks=3)
    try:
        yield Site(plane, nodes, redis_client)
    finally:
        nodes.stop()


def test_node_death_is_healed_elsewhere_and_the_node_boots_into_nothing_old(site: Site) -> None:
    victim = site.replica_on("sim-4")
    site.nodes.strike("node-death@0s+20s:nodes=sim-4")
    site.wait_for_liveness(alive=8, dead=1)
    site.wait_until_whole()
    assert Replica.objects.get(pk=victim).wanted != "run"
    site.wait_for_liveness(alive=9)
    wait_for(lambda: victim not in site.nodes.launches(), "the replaced replica to be forgotten", seconds=60)
    assert site.happened("lost", "recovered") == [("sim-4", "lost"), ("sim-4", "recovered")]
    assert set(site.nodes.launches().values()) == {1}
    assert {len(where) for where in site.nodes.places().values()} == {1}
    wait_for(site.is_whole, "the fleet as it was wished for", seconds=20)
    assert not Incident.objects.exists()


def test_partition_is_fenced_off_and_its_replica_let_go_when_it_ends(site: Site) -> None:
    victim = site.replica_on("sim-4")
    site.nodes.strike("partition@0s+20s:nodes=sim-4")
    site.wait_for_liveness(alive=8, dead=1)
    site.wait_until_whole()
    assert site.nodes.launches()[victim] == 1, "it runs on over there"
    site.wait_for_liveness(alive=9)
    wait_for(lambda: victim not in site.nodes.launches(), "the replaced replica to be stopped", seconds=60)
    assert site.nodes.epoch("sim-4") == NodeLease.objects.get(node__name="sim-4").epoch
    assert site.happened("lost", "recovered") == [("sim-4", "lost"), ("sim-4", "recovered")]
    assert set(site.nodes.launches().values()) == {1}
    assert site.is_whole()


def test_rack_loss_waits_for_a_person_and_is_then_healed_in_the_other_racks(
    site: Site, stay_away: Callable[[], None]
) -> None:
    lost = {name for number, name in enumerate(site.nodes.names) if number % 3 == 1}
    site.nodes.strike("rack-loss@0s:racks=r1")
    incident = wait_for(
        lambda: Incident.objects.filter(kind=MASS_SILENCE, status=OPEN).first(), "an incident", seconds=30
    )
    site.wait_for_liveness(alive=6, suspect=3)
    stay_away()
    assert site.happened("lost") == []
    assert healing_freeze()
    assert Replica.objects.count() == site.replicas, "nothing is healed on a suspicion"
    confirm_incident(incident.pk, reason="no power in r1", actor="user:test", now=clock.now())
    site.wait_for_liveness(alive=6, dead=3)
    site.wait_until_whole()
    assert {name for name, _ in site.happened("lost")} == lost
    assert not set(Replica.objects.filter(wanted="run").values_list("node__name", flat=True)) & lost
    assert Incident.objects.get().status == CONFIRMED
    assert set(site.nodes.launches().values()) == {1}


def test_mass_silence_that_ends_leaves_the_one_node_dead_that_really_died(site: Site) -> None:
    site.nodes.strike("node-death@0s:nodes=sim-4")
    site.nodes.strike("mass-silence@0s+8s")
    wait_for(lambda: Incident.objects.filter(status=OPEN).exists(), "an incident", seconds=30)
    site.wait_for_liveness(alive=8, dead=1)
    site.wait_until_whole()
    assert site.happened("lost") == [("sim-4", "lost")]
    wait_for(lambda: not healing_freeze(), "healing to go on", seconds=20)
    [incident] = Incident.objects.filter(kind=MASS_SILENCE)
    assert incident.status == RESOLVED
    assert set(site.nodes.launches().values()) == {1}


def test_flapping_node_is_believed_less_each_time_also_by_the_next_leader(
    site: Site, plane: ControlPlane
) -> None:
    spare = plane.start()
    wait_for(lambda: "waiting_for_lead" in spare.log.read_text(), "the spare to be up", seconds=40)
    site.nodes.strike("flapping@0s+75s:nodes=sim-4,down_seconds=6,up_seconds=6.5")
    wait_for(lambda: len(site.happened("lost")) == 2, "the second death", seconds=60)
    site.leader.signal(signal.SIGKILL)
    wait_for(spare.leads, "the spare to lead", seconds=20)
    # Up for at most six reports in a row and in need of eight from its third death on: it stays dead.
    site.wait_until_whole()
    wait_for(lambda: ("sim-4", "recovered") in site.happened("recovered")[1:], "the end of it", seconds=120)
    site.wait_for_liveness(alive=9)
    lost, back = len(site.happened("lost")), len(site.happened("recovered"))
    assert lost == back
    assert lost <= 4, "six times away, told and acted upon only as long as it was believed"
    made = Event.objects.filter(event="created", subject_kind="replica").count()
    assert made <= site.replicas + 3
    assert not Incident.objects.filter(kind=MASS_SILENCE).exists()


def test_lost_and_late_reports_kill_nobody(site: Site, stay_away: Callable[[], None]) -> None:
    site.nodes.strike("report-loss@0s:loss_ratio=0.1")
    site.nodes.strike("jitter@0s:jitter_ratio=0.9")
    stay_away()
    assert site.happened("lost") == []
    assert site.is_whole()
    assert not Incident.objects.exists()


def test_slow_node_is_alive_and_called_slow(site: Site) -> None:
    slow = site.replica_on("sim-4")
    site.nodes.strike("slow-node@0s:nodes=sim-4,delay_seconds=0.8,latency_factor=6")
    flagged = Event.objects.filter(event="slow")
    wait_for(flagged.exists, "a replica to be called slow", seconds=120)
    assert set(flagged.values_list("subject_id", flat=True)) == {slow}
    assert site.happened("lost") == []
    assert site.liveness_is(alive=9)
    assert Replica.objects.filter(wanted="run").count() == site.replicas, "told, not replaced"


def test_crashed_replica_is_started_again_where_it_was(site: Site) -> None:
    victim = site.replica_on("sim-4")
    site.nodes.strike("replica-crash@0s:nodes=sim-4")
    wait_for(lambda: site.nodes.launches()[victim] == 2, "the second attempt", seconds=30)
    site.wait_until_whole()
    assert Replica.objects.get(pk=victim).node == Node.objects.get(name="sim-4")
    [event] = Event.objects.filter(event="exited")
    assert (event.subject_id, f"signal {SIGKILL}" in event.reason) == (victim, True)
    assert Replica.objects.count() == site.replicas
    assert site.happened("missed", "lost") == []


def test_restarted_agent_gets_a_new_lease_and_its_replicas_go_on(site: Site) -> None:
    site.nodes.strike("agent-restart@0s:nodes=sim-4")
    wait_for(lambda: site.nodes.epoch("sim-4") == 2, "a new lease", seconds=30)
    site.wait_until_whole()
    assert set(site.nodes.launches().values()) == {1}
    assert site.happened("lost") == []
    assert Replica.objects.count() == site.replicas


def test_clock_that_jumps_under_way_is_shown_and_kills_nobody(
    site: Site, stay_away: Callable[[], None]
) -> None:
    site.nodes.strike("clock-jump@0s:nodes=sim-4,offset_seconds=600")
    skew = Node.objects.filter(name="sim-4").values_list("clock_skew_seconds", flat=True)
    wait_for(lambda: (skew.get() or 0) > 500, "the skew to be shown", seconds=30)
    stay_away()
    assert site.happened("missed", "lost") == []
    assert site.is_whole()
