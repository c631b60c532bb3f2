"""Incidents and drains: who may decide them, over REST and on pages, and what a new leader makes of them."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.test import Client

from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.drains import DrainWatch
from exaserve_ops.controllers.fleet_state import NodeView
from exaserve_ops.controllers.guard import Guard
from exaserve_ops.controllers.loop import KeyQueue
from exaserve_ops.dashboard import ports
from exaserve_ops.health.models import Incident
from exaserve_ops.health.selectors import healing_freeze
from exaserve_ops.health.services.incidents import confirm_incident, dismiss_incident, open_incident
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import advance_liveness, cordon_node, uncordon_node
from exaserve_ops.inventory.services.drain import drain_node, record_drain_progress, undrain_node
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import advance_replica, create_replicas, place_replica
from tests.fakes.race import race
from tests.fakes.world import NOW, JsonClient, client_with_key, make_deployment, make_node, make_user

pytestmark = pytest.mark.django_db


class NoLiveData:
    """Nothing has been published."""

    def read_node(self, node_id: str) -> None: ...

    def read_kv(self, node_id: str) -> None: ...

    def read_summary(self) -> None: ...


@pytest.fixture
def operator() -> JsonClient:
    return client_with_key(make_user("olga", "operator"))


@pytest.fixture
def viewer() -> JsonClient:
    return client_with_key(make_user("vera", "viewer"))


@pytest.fixture
def pages() -> Client:
    ports.live_reader.use(NoLiveData())  # type: ignore[arg-type]  # these pages read no more
    client = Client()
    client.force_login(make_user("otto", "operator"))
    return client


def silent_fleet(count: int = 5) -> list[NodeView]:
    views = []
    for index in range(count):
        node = make_node(f"n{index}")
        advance_liveness(node.pk, "missed", reason="silent", actor="test", now=NOW)
        views.append(NodeView(str(node.pk), name=node.name, liveness="suspect"))
    return views


def make_incident(**changes: object) -> Incident:
    fields = {"scope": "fleet", "node_ids": [], "evidence": "5 of 6 fell silent", "actor": "test", "now": NOW}
    return open_incident("mass_silence", **(fields | changes))  # type: ignore[arg-type]  # as above


# ------------------------------------------------------------------------------- incidents
def test_an_open_incident_freezes_healing_and_its_end_lifts_the_freeze() -> None:
    assert healing_freeze() == ""
    incident = make_incident()
    assert healing_freeze().startswith("Too many nodes fell silent at once: fleet; healing waits")
    dismiss_incident(incident.pk, reason="maintenance", actor="user:o", now=NOW)
    assert healing_freeze() == ""


def test_the_same_suspicion_twice_is_one_incident_that_grows() -> None:
    first, second = uuid4(), uuid4()
    one = make_incident(node_ids=[first])
    same = make_incident(node_ids=[second])
    assert one.pk == same.pk
    assert set(same.node_ids) == {first, second}


@pytest.mark.django_db(transaction=True)
def test_of_two_who_decide_at_once_one_is_told_that_it_is_over() -> None:
    incident = make_incident()
    results = race(
        lambda: confirm_incident(incident.pk, reason="a", actor="user:a", now=NOW),
        lambda: dismiss_incident(incident.pk, reason="b", actor="user:b", now=NOW),
        expect=[ConflictError],
    )
    assert sum(isinstance(result, ConflictError) for result in results) == 1
    assert Event.objects.filter(subject_kind="incident").count() == 2


def test_incidents_over_rest(operator: JsonClient, viewer: JsonClient) -> None:
    incident = make_incident()
    listed = viewer.get("/api/v1/incidents?status=open").json()
    assert [row["summary"] for row in listed["results"]] == ["Too many nodes fell silent at once: fleet"]
    address = f"/api/v1/incidents/{incident.pk}/confirm"
    assert viewer.post(address, {"reason": "x"}).status_code == 403
    assert operator.post(address, {}).status_code == 400
    done = operator.post(address, {"reason": "the power is off"})
    assert (done.status_code, done.json()["status"], done.json()["resolved_by"]) == (
        200,
        "confirmed",
        "user:olga",
    )
    assert operator.post(f"/api/v1/incidents/{incident.pk}/dismiss", {"reason": "x"}).status_code == 409
    event = Event.objects.get(event="confirm")
    assert (event.actor, event.reason, event.to_status) == ("user:olga", "the power is off", "confirmed")


def test_an_incident_is_on_the_fleet_page_in_the_bell_and_decided_on_its_own(pages: Client) -> None:
    node = make_node("n0")
    incident = make_incident(node_ids=[node.pk])
    problems = pages.get("/fleet/problems").content.decode()
    assert "5 of 6 fell silent" in problems
    assert "Nobody is declared dead" in problems
    page = pages.get(f"/incidents/{incident.pk}").content.decode()
    assert "Healing is frozen" in page
    assert '<span class="count" data-problem-count>1</span>' in page
    pages.post(f"/incidents/{incident.pk}/dismiss", {"reason": ""})
    assert healing_freeze()
    answer = pages.post(f"/incidents/{incident.pk}/dismiss", {"reason": "maintenance"}, follow=True)
    assert "Healing goes on" in answer.content.decode()
    assert not healing_freeze()


def test_a_new_leader_withholds_what_the_one_before_withheld_and_obeys_what_was_decided_meanwhile() -> None:
    views = silent_fleet()
    ids = frozenset(view.node_id for view in views)
    first = Guard()
    first.adopt()
    assert first.withhold(views, ids, 100.0) == ids
    incident = Incident.objects.get()
    confirm_incident(incident.pk, reason="really", actor="user:o", now=NOW)
    second = Guard()
    second.adopt()
    assert second.withhold(views, ids, 5.0) == frozenset()
    for view in views:
        view.liveness = "dead"
    second.withhold(views, frozenset(), 6.0)
    incident.refresh_from_db()
    assert incident.applied_at is not None


def test_those_that_die_right_after_a_confirmed_silence_are_not_withheld_again() -> None:
    views = silent_fleet(6)
    early = frozenset(view.node_id for view in views[:4])
    for view in views[4:]:
        view.liveness = "alive"
    guard = Guard()
    assert guard.withhold(views, early, 100.0) == early
    confirm_incident(Incident.objects.get().pk, reason="power", actor="user:o", now=NOW)
    assert guard.withhold(views, early, 100.3) == frozenset()
    for view in views[:4]:
        view.liveness = "dead"
        view.note_death(100.3)
    guard.withhold(views, frozenset(), 100.6)
    late = frozenset(view.node_id for view in views[4:])
    for view in views[4:]:
        view.liveness = "suspect"
    assert guard.withhold(views, late, 101.0) == frozenset()
    assert Incident.objects.count() == 1


def test_dismissed_nodes_stay_suspect_until_they_report() -> None:
    views = silent_fleet()
    ids = frozenset(view.node_id for view in views)
    guard = Guard()
    guard.withhold(views, ids, 100.0)
    dismiss_incident(Incident.objects.get().pk, reason="maintenance", actor="user:o", now=NOW)
    assert guard.withhold(views, ids, 101.0) == ids
    for view in views[1:]:
        view.liveness = "alive"
    left = frozenset({views[0].node_id})
    assert guard.withhold(views, left, 102.0) == left
    views[0].liveness = "alive"
    assert guard.withhold(views, frozenset(), 103.0) == frozenset()
    assert Incident.objects.get().applied_at is not None


def test_gateways_that_reach_everybody_else_confirm_a_lost_rack() -> None:
    views, replicas = [], []
    deployment = make_deployment(replicas=8)
    for index in range(8):
        node = make_node(f"n{index}", rack=f"r{index // 4}")
        [replica] = create_replicas(deployment.pk, 1, why="test", actor="test", now=NOW)
        uuid = node.accelerators.all()[0].uuid
        place_replica(replica.pk, Placement(str(node.pk), node.name, (uuid,), "t"), actor="t", now=NOW)
        advance_replica(replica.pk, "seen_ready", reason="", actor="test", now=NOW)
        replicas.append(replica.pk)
        views.append(NodeView(str(node.pk), liveness="suspect" if index < 4 else "alive"))
    lost = frozenset(view.node_id for view in views[:4])
    guard = Guard()
    assert guard.withhold(views, lost, 100.0) == lost
    assert Incident.objects.get().scope == "rack r0"
    Replica.objects.filter(pk__in=replicas[:4]).update(unroutable_reason="no answer within 2 s")
    guard.withhold(views, lost, 102.0)
    incident = Incident.objects.get()
    assert (incident.status, incident.resolved_by) == ("confirmed", "controller:guard")
    assert "gateways reach none of the 4 replicas on 4 of these nodes" in incident.resolution
    assert guard.withhold(views, lost, 102.3) == frozenset()


# ------------------------------------------------------------------------------- drains
def running_replica(node: Node) -> Replica:
    [replica] = create_replicas(make_deployment().pk, 1, why="test", actor="test", now=NOW)
    uuid = node.accelerators.all()[0].uuid
    place_replica(replica.pk, Placement(str(node.pk), node.name, (uuid,), "test"), actor="test", now=NOW)
    return advance_replica(replica.pk, "seen_ready", reason="", actor="test", now=NOW)


def test_draining_cordons_and_ends_when_the_last_replica_is_gone() -> None:
    node, queue = make_node("n1"), KeyQueue()
    replica = running_replica(node)
    drain_node(node.pk, reason="new disk", deadline_at=NOW + timedelta(days=9999), actor="user:o", now=NOW)
    watch = DrainWatch(queue)
    watch.step()
    node.refresh_from_db()
    assert (node.drain_status, node.cordoned, node.cordon_reason) == ("draining", True, "new disk")
    for event in ("stop", "seen_stopped"):
        advance_replica(replica.pk, event, reason="", actor="test", now=NOW)
    watch.step()
    node.refresh_from_db()
    assert node.drain_status == "drained"
    undrain_node(node.pk, actor="user:o", now=NOW)
    node.refresh_from_db()
    assert (node.drain_status, node.cordoned, node.drain_deadline_at) == ("none", False, None)
    told = Event.objects.filter(subject_id=node.pk, event__in=("drain", "emptied", "undrain"))
    assert told.count() == 3


def test_a_passed_deadline_has_the_plans_looked_at_at_once() -> None:
    node, queue = make_node("n1"), KeyQueue()
    replica = running_replica(node)
    drain_node(node.pk, reason="now", deadline_at=NOW, actor="user:o", now=NOW)
    DrainWatch(queue).step()
    assert queue.take(0.0) == ("deployment", str(replica.deployment_id))


def test_a_dead_node_counts_as_drained_once_everything_on_it_was_told_to_stop() -> None:
    node = make_node("n1")
    replica = running_replica(node)
    drain_node(node.pk, reason="broken", deadline_at=NOW, actor="user:o", now=NOW)
    advance_liveness(node.pk, "lost", reason="silent", actor="test", now=NOW)
    watch = DrainWatch(KeyQueue())
    watch.step()
    assert Node.objects.get().drain_status == "draining"
    advance_replica(replica.pk, "stop", reason="", actor="test", now=NOW)
    watch.step()
    assert Node.objects.get().drain_status == "drained"


def test_what_turns_up_on_a_drained_node_is_drained_too() -> None:
    node = make_node("n1")
    drain_node(node.pk, reason="x", deadline_at=NOW, actor="user:o", now=NOW)
    record_drain_progress(node.pk, left=0, actor="test", now=NOW)
    running_replica(node)
    DrainWatch(KeyQueue()).step()
    assert Node.objects.get().drain_status == "draining"


def test_a_node_under_drain_is_not_uncordoned_by_half() -> None:
    node = make_node("n1")
    drain_node(node.pk, reason="x", deadline_at=NOW, actor="user:o", now=NOW)
    with pytest.raises(ConflictError, match="undrain it"):
        uncordon_node(node.pk, actor="user:o", now=NOW)
    cordon_node(node.pk, reason="y", actor="user:o", now=NOW)
    record_drain_progress(node.pk, left=0, actor="test", now=NOW)
    with pytest.raises(ConflictError, match="drained already"):
        drain_node(node.pk, reason="x", deadline_at=NOW, actor="user:o", now=NOW)


def test_drain_over_rest(operator: JsonClient, viewer: JsonClient) -> None:
    node = make_node("n1")
    address = f"/api/v1/nodes/{node.pk}/drain"
    assert viewer.post(address, {"reason": "x"}).status_code == 403
    assert operator.post(address, {"reason": "x", "deadline_seconds": -1}).status_code == 400
    answer = operator.post(address, {"reason": "new disk", "deadline_seconds": 60})
    assert (answer.status_code, answer.json()["drain_status"]) == (200, "draining")
    assert answer.json()["drain_deadline_at"] is not None
    undone = operator.post(f"/api/v1/nodes/{node.pk}/undrain")
    assert (undone.json()["drain_status"], undone.json()["cordoned"]) == ("none", False)


def test_drain_on_the_page_shows_its_progress(pages: Client) -> None:
    node = make_node("n1")
    running_replica(node)
    refused = pages.post(f"/nodes/{node.pk}/drain", {"reason": "", "minutes": "5"}, follow=True)
    assert "Say why" in refused.content.decode()
    page = pages.post(f"/nodes/{node.pk}/drain", {"reason": "disk", "minutes": "5"}, follow=True)
    assert "1 of its replicas is left" in page.content.decode()
    assert "1 of its replicas is left" in pages.get(f"/nodes/{node.pk}/drain-state").content.decode()
    back = pages.post(f"/nodes/{node.pk}/undrain", follow=True)
    assert "takes new replicas" in back.content.decode()


def test_a_clock_that_is_off_by_minutes_has_a_badge(pages: Client) -> None:
    node = make_node("n1")
    Node.objects.update(clock_skew_seconds=119.0)
    assert "clock off" not in pages.get(f"/nodes/{node.pk}").content.decode()
    Node.objects.update(clock_skew_seconds=-600.0)
    assert "clock off" in pages.get(f"/nodes/{node.pk}").content.decode()
    assert "clock off" in pages.get("/nodes").content.decode()
