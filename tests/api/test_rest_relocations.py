"""Moves of conversations over REST and on the session's page."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Replica
from exaserve_ops.sessions.models import InferenceSession, Relocation
from tests.fakes.world import JsonClient, make_deployment, make_node, make_user

pytestmark = pytest.mark.django_db
NOBODY = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def pair() -> tuple[Replica, Replica]:
    """Two ready replicas of one deployment, on a node each."""
    deployment = make_deployment()
    replicas = [
        Replica.objects.create(
            name=f"r-{name}", deployment=deployment, node=make_node(name), memory_bytes=1, status="ready",
            address="127.0.0.1:4000", release=deployment.releases.get(),
        )
        for name in ("a", "b")
    ]  # fmt: skip
    Node.objects.update(liveness="alive")
    return replicas[0], replicas[1]


@pytest.fixture
def session(pair: tuple[Replica, Replica]) -> InferenceSession:
    now = clock.now()
    return InferenceSession.objects.create(
        session_id="talk",
        model_name="m",
        replica=pair[0],
        context_tokens=640,
        first_turn_at=now,
        last_turn_at=now,
    )


def address(session: InferenceSession) -> str:
    return f"/api/v1/sessions/{session.pk}/move"


def test_move_is_asked_for_once_and_listed(
    operator: JsonClient, viewer: JsonClient, session: InferenceSession, pair: tuple[Replica, Replica]
) -> None:
    assert viewer.post(address(session), {"reason": "x"}).status_code == 403
    assert operator.post(address(session), {}).status_code == 400
    assert operator.post(address(session), {"reason": "x", "goal": "y"}).status_code == 400
    assert operator.post(address(session), {"reason": "x", "target": NOBODY}).status_code == 409
    assert (
        "no such replica"
        in operator.post(address(session), {"reason": "x", "target": NOBODY}).content.decode()
    )
    answer = operator.post(address(session), {"reason": "closer to its user"})
    assert answer.status_code == 202
    body = answer.json()
    assert (body["session"], body["session_id"], body["status"]) == (session.pk, "talk", "planned")
    assert (body["source"], body["target"]) == (str(pair[0].pk), str(pair[1].pk))
    assert Event.objects.get(event="move_asked").reason.endswith("closer to its user")
    assert operator.post(address(session), {"reason": "x"}).status_code == 409
    [listed] = viewer.get("/api/v1/relocations", {"session": session.pk}).json()["results"]
    assert listed == viewer.get(f"/api/v1/relocations/{body['id']}").json() == body
    assert viewer.get("/api/v1/relocations", {"status": "done"}).json()["results"] == []
    assert viewer.get("/api/v1/relocations", {"trigger": "asked"}).json()["results"] == [body]
    assert viewer.get("/api/v1/relocations", {"trigger": "balance"}).json()["results"] == []
    assert viewer.get("/api/v1/relocations", {"trigger": "x"}).status_code == 400


def test_plan_says_what_would_move_and_changes_nothing(
    viewer: JsonClient, session: InferenceSession, pair: tuple[Replica, Replica]
) -> None:
    idle = viewer.get("/api/v1/relocations/plan").json()
    assert (idle["moves"], idle["stays"], idle["underway"]) == ([], [], 0)
    assert idle["limits"]["moves_per_node"] == 2
    Node.objects.filter(pk=pair[0].node_id).update(drain_status="draining")
    [move] = viewer.get("/api/v1/relocations/plan").json()["moves"]
    assert (move["session"], move["target"], move["why"]) == (
        session.pk,
        str(pair[1].pk),
        "node a is drained",
    )
    assert (move["way"], move["context_tokens"]) == ("transfer", 640)
    Replica.objects.filter(pk=pair[1].pk).update(wanted="drain")
    [stay] = viewer.get("/api/v1/relocations/plan").json()["stays"]
    assert stay["why"] == "no other replica of its deployment takes conversations now"
    assert viewer.get("/api/v1/relocations/plan", {"x": "1"}).status_code == 400
    assert not Relocation.objects.exists()


def test_session_page_offers_a_move_and_shows_how_it_goes(
    session: InferenceSession, pair: tuple[Replica, Replica]
) -> None:
    client = Client()
    client.force_login(make_user("an-operator", "operator"))
    page = reverse("session", args=[session.pk])
    assert "r-b on b" in client.get(page).content.decode()
    move = reverse("session_move", args=[session.pk])
    assert "Say why" in client.post(move, {"target": ""}, follow=True).content.decode()
    assert "Not done" in client.post(move, {"target": "x", "reason": "y"}, follow=True).content.decode()
    done = client.post(move, {"target": str(pair[1].pk), "reason": "closer"}, follow=True).content.decode()
    assert "It moves to r-b before its next turn" in done
    assert "Moves between turns" in done
    assert "on its way already" in client.post(move, {"reason": "again"}, follow=True).content.decode()
    reader = Client()
    reader.force_login(make_user("a-viewer", "viewer"))
    assert "Move to…" not in reader.get(page).content.decode()
    assert reader.post(move, {"reason": "x"}).status_code == 403


def test_balance_is_a_setting_of_a_deployment_with_bounds(
    operator: JsonClient, pair: tuple[Replica, Replica]
) -> None:
    address = f"/api/v1/deployments/{pair[0].deployment_id}"
    known = operator.get(address).json()
    assert (known["balance_sessions"], known["balance_from_percent"], known["balance_gap_percent"]) == (
        True,
        90,
        30,
    )
    assert known["balancing_since"] is None
    change = {"balance_sessions": False, "balance_gap_percent": 20, "generation": known["generation"]}
    changed = operator.patch(address, change).json()
    assert (changed["balance_sessions"], changed["balance_gap_percent"]) == (False, 20)
    wrong = {"balance_from_percent": 1, "generation": changed["generation"]}
    assert operator.patch(address, wrong).status_code == 400
