"""What is simulated says so wherever it is shown, and nothing real does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.dashboard.plans import preview_scale
from exaserve_ops.health.services.incidents import open_incident
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.spread import view_spread
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.selectors import deployment_snapshot
from exaserve_ops.serving.services.replicas import create_replicas
from exaserve_ops.sessions.models import InferenceSession
from tests.fakes.world import NOW, make_deployment, make_node

MARK = 'class="tag sim"'


@pytest.fixture
def mixed(operator: Client) -> dict[str, Any]:  # noqa: ARG001 - opens the database
    """A real node and a simulated one, with a replica on each, both of one deployment."""
    real, simulated = make_node("gpu-1"), make_node("sim-1", rack="sim-rack")
    Node.objects.filter(pk=simulated.pk).update(simulated=True)
    deployment = make_deployment("chat", replicas=2)
    first, second = create_replicas(deployment.pk, 2, why="2 of 2", actor="test", now=NOW)
    for replica, node in ((first, real), (second, simulated)):
        Replica.objects.filter(pk=replica.pk).update(node=node, status="ready")
    return {"real": real, "simulated": simulated, "deployment": deployment, "replicas": (first, second)}


def _of(operator: Client, page: str, *args: object, **query: str) -> str:
    return operator.get(reverse(page, args=args), query).content.decode()


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("page", ["nodes", "replicas"])
def test_each_simulated_row_of_a_list_is_marked_and_can_be_left_out(operator: Client, page: str) -> None:
    assert _of(operator, page).count(MARK) == 1
    assert _of(operator, page, simulated="False").count(MARK) == 0
    only = _of(operator, page, simulated="True")
    assert "sim-1" in only
    assert ">gpu-1</a>" not in only


def test_pages_of_one_object_say_it_beside_the_title(operator: Client, mixed: dict[str, Any]) -> None:
    first, second = mixed["replicas"]
    for page in ("replica", "replica_drawer"):
        assert MARK in _of(operator, page, second.pk)
        assert MARK not in _of(operator, page, first.pk)
    assert MARK in _of(operator, "node", mixed["simulated"].pk)


def test_a_deployment_says_how_much_of_it_is_simulated(operator: Client, mixed: dict[str, Any]) -> None:
    pk = mixed["deployment"].pk
    assert ">1 simulated</span>" in _of(operator, "deployment", pk)
    assert ">1 simulated</span>" in _of(operator, "deployments")
    Replica.objects.update(node=mixed["simulated"])
    assert ">simulated</span>" in _of(operator, "deployment_row", pk)
    Replica.objects.update(node=mixed["real"])
    assert MARK not in _of(operator, "deployments")


def test_plans_and_losses_name_simulated_places(operator: Client, mixed: dict[str, Any]) -> None:
    snapshot = deployment_snapshot(mixed["deployment"].pk, active_sessions={}, now=NOW)
    assert snapshot is not None
    spread = view_spread(snapshot.nodes, snapshot.request)
    losses = {(loss.kind, loss.name): loss.simulated for loss in spread.losses}
    assert losses[("rack", "sim-rack")]
    assert losses[("node", "sim-1")]
    assert not losses[("node", "gpu-1")]
    lines = preview_scale(snapshot, 4, now=NOW).lines
    assert {(line.detail, line.simulated) for line in lines} == {("on gpu-1", False), ("on sim-1", True)}
    leaving = replace(snapshot, replicas_wanted=0)
    assert {line.simulated for line in preview_scale(leaving, 0, now=NOW).lines} == {True, False}
    assert _of(operator, "deployment_plan", mixed["deployment"].pk).count(MARK) == 2


def test_incidents_of_simulated_nodes_are_told_from_real_ones(
    operator: Client, mixed: dict[str, Any]
) -> None:
    def silent(scope: str, *names: str) -> Any:
        ids = [mixed[name].pk for name in names]
        return open_incident("mass_silence", scope=scope, node_ids=ids, evidence="all", actor="t", now=NOW).pk

    whole = silent("rack sim-rack", "simulated")
    partly = silent("fleet", "simulated", "real")
    assert _of(operator, "incidents").count(MARK) == 1
    assert ">simulated</span>" in _of(operator, "incident", whole)
    page = _of(operator, "incident", partly)
    assert "1 of 2 simulated" in page
    problems = _of(operator, "fleet_problems")
    assert problems.count(MARK) == 1


def test_events_of_simulated_subjects_are_marked_with_each_kind_of_subject(
    operator: Client, mixed: dict[str, Any]
) -> None:
    rows = _of(operator, "events", kind="node")
    assert rows.count(MARK) * 2 == rows.count("<tr data-event-id")
    rows = _of(operator, "events", kind="replica")
    assert rows.count(MARK) == 1
    assert MARK not in _of(operator, "events", kind="deployment"), "half of it is real"
    Replica.objects.update(node=mixed["simulated"])
    assert MARK in _of(operator, "events", kind="deployment")
    assert MARK in _of(operator, "fleet_events")


def test_sessions_and_search_say_it_too(operator: Client, mixed: dict[str, Any]) -> None:
    session = InferenceSession.objects.create(
        session_id="s", model_name="m", replica=mixed["replicas"][1], first_turn_at=NOW, last_turn_at=NOW
    )
    assert MARK in _of(operator, "sessions")
    assert MARK in _of(operator, "session", session.pk)
    found = _of(operator, "search", q="sim-1")
    assert "alive, simulated" in found
    assert "simulated" not in _of(operator, "search", q="gpu-1")


@pytest.mark.usefixtures("mixed")
def test_the_fleet_page_counts_the_simulated_nodes_and_hides_the_notice_without(
    operator: Client,
) -> None:
    page = _of(operator, "fleet")
    assert "1 of 2 nodes are simulated" in page
    assert 'data-simulation data-total="2">' in page
    Node.objects.update(simulated=False)
    assert 'data-simulation data-total="2" hidden>' in _of(operator, "fleet")


@pytest.mark.usefixtures("mixed")
def test_problems_on_simulated_nodes_are_marked(operator: Client) -> None:
    Node.objects.update(liveness="dead", liveness_reason="silent", liveness_changed_at=clock.now())
    Replica.objects.update(status="failed", status_changed_at=clock.now())
    assert _of(operator, "fleet_problems").count(MARK) == 2
