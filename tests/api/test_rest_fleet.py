"""Nodes, models, replicas, sessions, events and keys over REST."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext

from exaserve_ops.access.models import ApiKey
from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import JoinToken, Node
from exaserve_ops.routing.selectors import inference_keys
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.replicas import advance_replica, create_replicas, place_replica
from exaserve_ops.sessions.domain.timeline import TurnMark, add_to_stays, add_turn
from exaserve_ops.sessions.models import InferenceSession
from tests.api.conftest import Telemetry
from tests.fakes.world import (
    NOW,
    JsonClient,
    client_with_key,
    make_deployment,
    make_model,
    make_node,
    make_user,
)

pytestmark = pytest.mark.django_db


def make_replica(deployment: Deployment, node: Node, *events: str) -> Replica:
    [replica] = create_replicas(deployment.pk, 1, why="test", actor="test", now=NOW)
    uuid = node.accelerators.all()[0].uuid
    place_replica(replica.pk, Placement(str(node.pk), node.name, (uuid,), "test"), actor="test", now=NOW)
    for event in events:
        advance_replica(replica.pk, event, reason=event, actor="test", now=NOW)
    replica.refresh_from_db()
    return replica


def test_cordon_keeps_its_reason_and_uncordon_lifts_it(operator: JsonClient, node: Node) -> None:
    answer = operator.post(f"/api/v1/nodes/{node.pk}/cordon", {"reason": "kernel update"})
    assert answer.status_code == 200, answer.json()
    assert (answer.json()["cordoned"], answer.json()["cordon_reason"]) == (True, "kernel update")
    assert operator.post(f"/api/v1/nodes/{node.pk}/cordon", {}).status_code == 400
    lifted = operator.post(f"/api/v1/nodes/{node.pk}/uncordon")
    assert (lifted.status_code, lifted.json()["cordoned"]) == (200, False)
    assert [e.event for e in Event.objects.filter(subject_id=node.pk)[:2]] == ["uncordoned", "cordoned"]


def test_node_shows_its_hardware_and_rack(viewer: JsonClient, node: Node) -> None:
    body = viewer.get(f"/api/v1/nodes/{node.pk}").json()
    assert (body["rack"], body["liveness"], len(body["accelerators"])) == ("r1", "alive", 2)
    uuid = body["accelerators"][0]["uuid"]
    assert viewer.get(f"/api/v1/accelerators/{uuid}").json()["node"] == str(node.pk)
    assert viewer.get(f"/api/v1/nodes?rack=r1&liveness=alive&name={node.name.upper()}").json()["count"] == 1
    assert viewer.get("/api/v1/nodes?rack=r2").json()["count"] == 0


def test_join_token_is_listed_without_its_text(operator: JsonClient) -> None:
    made = operator.post("/api/v1/nodes/join-tokens", {"note": "rack 1", "lifetime_seconds": 600})
    assert made.status_code == 201
    token = JoinToken.objects.get()
    assert token.expires_at - token.created_at == timedelta(seconds=600)
    [listed] = operator.get("/api/v1/nodes/join-tokens?used=false").json()["results"]
    assert listed["id"] == made.json()["id"]
    assert "token" not in listed
    assert operator.get("/api/v1/nodes/join-tokens?used=true").json()["count"] == 0


def test_model_is_registered_from_its_folder_once(operator: JsonClient, model_folder: Path) -> None:
    wish = {"name": "tiny", "folder": str(model_folder)}
    made = operator.post("/api/v1/models", wish)
    assert made.status_code == 201, made.json()
    assert made.json()["parameter_count"] == 6
    assert [f["path"] for f in made.json()["files"]] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert operator.post("/api/v1/models", wish).status_code == 200
    (model_folder / "tokenizer.json").write_text('{"other": 1}')
    assert operator.post("/api/v1/models", wish).status_code == 409
    assert Model.objects.count() == 1


def test_folder_that_is_no_model_is_refused_with_the_reason(operator: JsonClient, tmp_path: Path) -> None:
    answer = operator.post("/api/v1/models", {"name": "x", "folder": str(tmp_path)})
    assert answer.status_code == 400
    assert "config.json" in answer.json()["error"]["fields"]["folder"][0]
    assert operator.post("/api/v1/models", {"name": "x", "folder": "../etc"}).status_code == 400


def test_replica_carries_live_telemetry_where_there_is_any(
    viewer: JsonClient, deployment: Deployment, node: Node, telemetry: Telemetry
) -> None:
    replica = make_replica(deployment, node, "seen_ready")
    address = f"/api/v1/replicas/{replica.pk}"
    assert viewer.get(address).json()["live"] is None
    telemetry.nodes[str(node.pk)] = {"replicas": {str(replica.pk): {"state": "ready"}}}
    body = viewer.get(address).json()
    assert body["live"] == {"state": "ready"}
    assert (body["node_name"], body["status"], len(body["accelerators"])) == (node.name, "ready", 1)


def test_replica_without_a_node_has_no_telemetry(viewer: JsonClient, deployment: Deployment) -> None:
    [replica] = create_replicas(deployment.pk, 1, why="test", actor="test", now=NOW)
    body = viewer.get(f"/api/v1/replicas/{replica.pk}").json()
    assert (body["live"], body["node"], body["node_name"]) == (None, None, None)


def test_exit_log_shows_how_the_last_attempt_ended(
    viewer: JsonClient, deployment: Deployment, node: Node
) -> None:
    replica = make_replica(deployment, node)
    empty = viewer.get(f"/api/v1/replicas/{replica.pk}/exit-log").json()
    assert empty == {"attempt": None, "code": None, "signal": None, "after_seconds": None, "log_tail": []}
    Replica.objects.filter(pk=replica.pk).update(
        exit_attempt=2, exit_signal=9, exit_after_seconds=1.5, exit_log_tail=["out of memory"]
    )
    body = viewer.get(f"/api/v1/replicas/{replica.pk}/exit-log").json()
    assert (body["attempt"], body["signal"], body["log_tail"]) == (2, 9, ["out of memory"])


def test_only_a_failed_replica_restarts(operator: JsonClient, deployment: Deployment, node: Node) -> None:
    healthy = make_replica(deployment, node, "seen_ready")
    failed = make_replica(deployment, node, "seen_failed")
    assert operator.post(f"/api/v1/replicas/{healthy.pk}/restart").status_code == 409
    answer = operator.post(f"/api/v1/replicas/{failed.pk}/restart", {"reason": "new driver"})
    assert (answer.status_code, answer.json()["generation"]) == (200, failed.generation + 1)


def test_replaced_replica_is_let_go_once(operator: JsonClient, deployment: Deployment, node: Node) -> None:
    replica = make_replica(deployment, node, "seen_ready")
    address = f"/api/v1/replicas/{replica.pk}/replace"
    assert operator.post(address).status_code == 400
    answer = operator.post(address, {"reason": "slow"})
    assert (answer.json()["wanted"], answer.json()["status"]) == ("drain", "draining")
    assert operator.post(address, {"reason": "slow"}).status_code == 409


def test_stopped_replicas_are_listed_when_asked_for(
    viewer: JsonClient, deployment: Deployment, node: Node
) -> None:
    make_replica(deployment, node, "seen_ready")
    gone = make_replica(deployment, node, "stop", "seen_stopped")
    assert viewer.get("/api/v1/replicas").json()["count"] == 1
    assert viewer.get("/api/v1/replicas?ended=true").json()["count"] == 2
    [listed] = viewer.get("/api/v1/replicas?status=stopped").json()["results"]
    assert listed["id"] == str(gone.pk)
    assert viewer.get(f"/api/v1/replicas/{gone.pk}").status_code == 200
    assert viewer.get(f"/api/v1/replicas?node={node.pk}&deployment={deployment.pk}").json()["count"] == 1


MARK = TurnMark(1.8e9, 2.0, 0.25, "r1", "continued", "ok", 100, None, 20, 2, ("r0",))


def test_sessions_are_found_by_replica_node_and_time(
    viewer: JsonClient, deployment: Deployment, node: Node
) -> None:
    replica = make_replica(deployment, node, "seen_ready")
    for minutes in range(3):
        at = NOW + timedelta(minutes=minutes)
        InferenceSession.objects.create(
            session_id=f"s{minutes}",
            model_name="tiny",
            replica=replica,
            node_name=node.name,
            first_turn_at=NOW,
            last_turn_at=at,
            latest_turns=add_turn([], MARK),
            stays=add_to_stays([], MARK, node.name),
        )
    since = (NOW + timedelta(minutes=1)).isoformat().replace("+", "%2B")
    found = viewer.get(f"/api/v1/sessions?since={since}&replica={replica.pk}&node=n1").json()
    assert [s["session_id"] for s in found["results"]] == ["s2", "s1"]
    one = viewer.get(f"/api/v1/sessions/{found['results'][0]['id']}").json()
    assert one["session_id"] == "s2"
    assert one["latest_turns"][0] == {
        "at": "2027-01-15T08:00:00Z",
        **{name: value for name, value in MARK._asdict().items() if name != "at_seconds"},
        "continued_from": ["r0"],
    }
    assert one["stays"][0]["node_name"] == "n1"
    assert one["stays"][0]["last_at"] == "2027-01-15T08:00:02Z"
    assert "latest_turns" not in found["results"][0], "lists stay short"
    assert viewer.get("/api/v1/sessions?since=yesterday").status_code == 400


def test_events_come_newest_first_by_cursor(viewer: JsonClient, deployment: Deployment) -> None:
    create_replicas(deployment.pk, 3, why="test", actor="test", now=NOW)
    seen: list[int] = []
    address: str | None = "/api/v1/events?page_size=2&subject_kind=replica"
    while address:
        page = viewer.get(address).json()
        seen += [event["id"] for event in page["results"]]
        address = page["next"]
    assert len(seen) == 3
    assert seen == sorted(seen, reverse=True)
    assert viewer.get(f"/api/v1/events/{seen[0]}").json()["event"] == "created"


def test_key_is_made_shown_once_and_revoked_at_once(operator: JsonClient) -> None:
    made = operator.post("/api/v1/keys", {"name": "ci", "scopes": ["api", "inference"]}).json()
    other = JsonClient()
    other.credentials(HTTP_AUTHORIZATION=f"Bearer {made['key']}")
    assert other.get("/api/v1/nodes").status_code == 200
    shown = operator.get(f"/api/v1/keys/{made['id']}").json()
    assert made["key"].startswith(shown["prefix"])
    assert "key" not in shown
    assert operator.post(f"/api/v1/keys/{made['id']}/revoke").json()["revoked_at"]
    assert other.get("/api/v1/nodes").status_code == 401


def test_limits_of_a_key_are_set_by_who_manages_keys_and_reach_gateways_and_the_audit_log(
    operator: JsonClient, admin: JsonClient
) -> None:
    wish = {"name": "ci", "scopes": ["inference"], "max_concurrent_requests": 4, "traffic_class": "batch"}
    made = operator.post("/api/v1/keys", wish).json()
    assert (made["max_concurrent_requests"], made["tokens_per_minute"]) == (4, None)
    address = f"/api/v1/keys/{made['id']}/limits"
    other = {"tokens_per_minute": 60_000, "reason": "trial is over"}
    assert operator.post(address, other).status_code == 403, "its user does not raise its limits"
    changed = admin.post(address, other).json()
    assert (changed["max_concurrent_requests"], changed["tokens_per_minute"]) == (None, 60_000)
    assert changed["traffic_class"] == "interactive"
    told = {record.key_id: record for record in inference_keys(now=NOW).values()}[made["id"]]
    assert (told.max_concurrent_requests, told.tokens_per_minute) == (None, 60_000)
    [event] = admin.get("/api/v1/events?subject_kind=api_key&event=limits_changed").json()["results"]
    assert event["reason"] == (
        "4 requests at once; batch → 60,000 tokens a minute; interactive: trial is over"
    )
    admin.post(address, other)
    again = admin.get("/api/v1/events?subject_kind=api_key&event=limits_changed").json()
    assert len(again["results"]) == 1, "nothing changed, nothing happened"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_concurrent_requests": 0},
        {"tokens_per_minute": -1},
        {"tokens_per_minute": 10**12},
        {"traffic_class": "vip"},
        {"max_concurent_requests": 3},
    ],
)
def test_impossible_limits_are_refused(admin: JsonClient, wrong: dict[str, object]) -> None:
    answer = admin.post("/api/v1/keys", {"name": "ci", "scopes": ["inference"], **wrong})
    assert answer.status_code == 400
    assert next(iter(wrong)) in answer.content.decode()


def test_key_with_an_end_in_the_past_or_no_scope_is_refused(operator: JsonClient) -> None:
    past = {"name": "ci", "scopes": ["api"], "expires_at": "2020-01-01T00:00:00Z"}
    assert operator.post("/api/v1/keys", past).status_code == 400
    assert operator.post("/api/v1/keys", {"name": "ci", "scopes": []}).status_code == 400
    assert operator.post("/api/v1/keys", {"name": "ci", "scopes": ["root"]}).status_code == 400


def test_nobody_makes_a_key_that_could_do_more_than_its_maker(
    operator: JsonClient, admin: JsonClient
) -> None:
    root = User.objects.create_superuser("root", password="a long enough password")
    other, viewer = make_user("other-operator", "operator"), make_user("some-viewer", "viewer")
    wish = {"name": "x", "scopes": ["api"]}
    for owner in (root, other, viewer):
        assert operator.post("/api/v1/keys", wish | {"user": owner.username}).status_code == 403
    unknown = operator.post("/api/v1/keys", wish | {"user": "nobody-at-all"})
    assert unknown.status_code == 403  # not 404: names stay private
    assert admin.post("/api/v1/keys", wish | {"user": "root"}).status_code == 403
    made = admin.post("/api/v1/keys", wish | {"user": "other-operator"})
    assert (made.status_code, made.json()["user"]) == (201, "other-operator")
    assert client_with_key(root).post("/api/v1/keys", wish | {"user": "root"}).status_code == 201


def test_keys_of_others_are_for_admins(
    operator: JsonClient, admin: JsonClient, as_role: Callable[[str], JsonClient]
) -> None:
    as_role("operator")
    theirs = ApiKey.objects.exclude(user__username__startswith="admin").last()
    assert theirs is not None
    assert operator.get("/api/v1/keys").json()["count"] == 1
    own = operator.get("/api/v1/keys").json()["results"][0]["id"]
    foreign = next(k for k in ApiKey.objects.all() if str(k.pk) != own)
    assert operator.get(f"/api/v1/keys/{foreign.pk}").status_code == 404
    assert operator.post(f"/api/v1/keys/{foreign.pk}/revoke").status_code == 404
    assert admin.get("/api/v1/keys").json()["count"] == ApiKey.objects.count()
    assert admin.post(f"/api/v1/keys/{theirs.pk}/revoke").status_code == 200


@pytest.mark.parametrize(
    ("address", "budget"),
    [
        ("nodes", 4),
        ("accelerators", 3),
        ("models", 3),
        ("deployments", 3),
        ("replicas", 4),
        ("sessions", 3),
        ("events", 2),
        ("keys", 3),
        ("nodes/join-tokens", 3),
        ("nodes/installations", 2),
        ("nodes/host-keys", 2),
    ],
)
def test_number_of_queries_does_not_grow_with_the_list(address: str, budget: int) -> None:
    """The budget counts the list's own queries; four more are the key and its user's permissions."""
    user = make_user("reader", "admin")
    client = client_with_key(user)

    def count_queries() -> int:
        with CaptureQueriesContext(
            connection,
        ) as queries:
            assert client.get(f"/api/v1/{address}").status_code == 200
        return len(queries)

    def grow(index: int) -> None:
        node = make_node(f"n{index}", rack=f"r{index}")
        replica = make_replica(make_deployment(f"d{index}"), node)
        make_model(f"m{index}")
        client_with_key(make_user(f"u{index}", "viewer"))
        InferenceSession.objects.create(
            session_id=str(uuid4()), model_name="m", replica=replica, first_turn_at=NOW, last_turn_at=NOW
        )

    grow(0)
    few = count_queries()
    for index in range(1, 6):
        grow(index)
    many = count_queries()
    assert many == few
    assert many <= budget + 4
