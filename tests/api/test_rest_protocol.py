"""Refusals have one shape, the schema is complete and served offline, the probes tell nothing."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings
from django.contrib.staticfiles import finders
from django.core.management import call_command
from django.test import Client
from drf_spectacular.validation import validate_schema

from exaserve_ops.api.parsers import MAX_BODY_BYTES
from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import JoinToken, Node
from exaserve_ops.inventory.services import create_join_token
from exaserve_ops.lib import clock
from exaserve_ops.lib.refusals import RefusalBound
from exaserve_ops.serving.models import Deployment
from tests.fakes.world import JsonClient, make_user
from workers.protocol import store_user
from workers.protocol.digests import node_key

JOIN = "/api/v1/agent/join"
UNKNOWN = "00000000-0000-4000-8000-000000000000"


def code_of(answer: Any) -> tuple[int, str]:
    assert answer["Content-Type"].endswith("json")
    error = answer.json()["error"]
    assert error["message"]
    assert set(error) <= {"code", "message", "fields"}
    return answer.status_code, error["code"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("method", "address", "body", "kind", "expected"),
    [
        ("get", "/api/v1/nothing", b"", "application/json", (404, "not_found")),
        ("get", "/api/v2/nodes", b"", "application/json", (404, "not_found")),
        ("get", "/api/v1/nodes/", b"", "application/json", (404, "not_found")),
        ("get", f"/api/v1/nodes/{UNKNOWN}", b"", "application/json", (404, "not_found")),
        ("get", "/api/v1/nodes/not-a-uuid", b"", "application/json", (404, "not_found")),
        ("get", "/api/v1/sessions/99999999999999999999999", b"", "application/json", (404, "not_found")),
        ("get", "/api/v1/nodes?page=99999999999999999999", b"", "application/json", (404, "not_found")),
        ("get", "/api/v1/nodes?cordoned=perhaps&liveness=x", b"", "application/json", (400, "invalid")),
        ("get", "/api/v1/events?cursor=nonsense", b"", "application/json", (404, "not_found")),
        ("get", "/api/v1/deployments?name=%00", b"", "application/json", (400, "invalid")),
        ("post", "/api/v1/deployments", b"{", "application/json", (400, "parse_error")),
        ("post", "/api/v1/deployments", b"\xff", "application/json", (400, "parse_error")),
        ("post", "/api/v1/deployments", b"[1]", "application/json", (400, "invalid")),
        ("post", "/api/v1/deployments", b"null", "application/json", (400, "invalid")),
        ("post", "/api/v1/deployments", b'{"replicas": NaN}', "application/json", (400, "parse_error")),
        ("post", "/api/v1/deployments", b"[" * 100_000, "application/json", (400, "parse_error")),
        ("post", "/api/v1/deployments", b'{"\\ud800": 1}', "application/json", (400, "parse_error")),
        ("post", "/api/v1/deployments", b" " * (MAX_BODY_BYTES + 1), "application/json", (413, "too_large")),
        (
            "post",
            "/api/v1/deployments",
            b"a=1",
            "application/x-www-form-urlencoded",
            (415, "unsupported_media_type"),
        ),
        ("put", "/api/v1/deployments", b"{}", "application/json", (405, "method_not_allowed")),
        ("delete", "/api/v1/nodes", b"", "application/json", (405, "method_not_allowed")),
        ("options", "/api/v1/nodes", b"", "application/json", (405, "method_not_allowed")),
        ("get", JOIN, b"", "application/json", (405, "method_not_allowed")),
        ("post", JOIN, b"{", "application/json", (400, "parse_error")),
        ("post", JOIN, b"{}", "application/json", (400, "invalid")),
    ],
)
def test_refusal_has_the_common_shape(
    operator: JsonClient, method: str, address: str, *, body: bytes, kind: str, expected: tuple[int, str]
) -> None:
    answer = operator.generic(method.upper(), address, body, content_type=kind)  # type: ignore[arg-type]  # bytes will do
    assert code_of(answer) == expected


@pytest.mark.django_db
def test_stranger_is_told_how_to_sign_in_and_the_rightless_what_they_lack(
    as_role: Callable[[str], JsonClient],
) -> None:
    stranger = JsonClient().get("/api/v1/nodes")
    assert code_of(stranger) == (401, "not_authenticated")
    assert stranger["WWW-Authenticate"].startswith("Bearer")
    assert code_of(JsonClient().get("/api/v1/nothing")) == (401, "not_authenticated")
    assert code_of(as_role("").get("/api/v1/nodes")) == (403, "permission_denied")


@pytest.mark.django_db
def test_browser_session_changes_things_with_its_csrf_token_only() -> None:
    make_user("op", "operator")
    client = Client(enforce_csrf_checks=True)
    assert client.login(username="op", password="a long enough password")
    refused = client.post("/api/v1/nodes/join-tokens", "{}", content_type="application/json")
    assert code_of(refused) == (403, "permission_denied")
    token = client.get("/keys").cookies[settings.CSRF_COOKIE_NAME].value
    let_in = client.post(
        "/api/v1/nodes/join-tokens", "{}", content_type="application/json", headers={"X-CSRFToken": token}
    )
    assert let_in.status_code == 201


ROLE_TABLE: list[tuple[str, str, dict[str, Any], bool, bool, bool]] = [
    # method, address, body; viewer, operator, admin
    ("get", "/api/v1/nodes", {}, True, True, True),
    ("get", "/api/v1/nodes/{node}", {}, True, True, True),
    ("get", "/api/v1/nodes/{node}/machine", {}, True, True, True),
    ("get", "/api/v1/nodes/{node}/history", {}, True, True, True),
    ("get", "/api/v1/accelerators", {}, True, True, True),
    ("get", "/api/v1/models", {}, True, True, True),
    ("get", "/api/v1/models/{key}/swarm", {}, True, True, True),
    ("get", "/api/v1/deployments", {}, True, True, True),
    ("get", "/api/v1/deployments/{deployment}", {}, True, True, True),
    ("post", "/api/v1/deployments/{deployment}/plan", {"replicas": 1}, True, True, True),
    ("get", "/api/v1/engines", {}, True, True, True),
    ("post", "/api/v1/deployments/import", {"text": "vllm serve m"}, False, True, True),
    ("get", "/api/v1/replicas", {}, True, True, True),
    ("get", "/api/v1/replicas/{replica}/log?member=0", {}, True, True, True),
    ("get", "/api/v1/replicas/{replica}/exit-log?member=0", {}, True, True, True),
    ("get", "/api/v1/sessions", {}, True, True, True),
    ("get", "/api/v1/sessions/gateways", {}, True, True, True),
    ("get", "/api/v1/relocations/plan", {}, True, True, True),
    ("get", "/api/v1/events", {}, True, True, True),
    ("get", "/api/v1/keys", {}, True, True, True),
    ("get", "/api/v1/nodes/join-tokens", {}, True, True, True),
    ("get", "/api/v1/schema", {}, True, True, True),
    ("post", "/api/v1/nodes/{node}/cordon", {"reason": "x"}, False, True, True),
    ("post", "/api/v1/nodes/{node}/uncordon", {}, False, True, True),
    ("post", "/api/v1/nodes/join-tokens", {}, False, True, True),
    ("get", "/api/v1/nodes/installations", {}, True, True, True),
    ("get", "/api/v1/nodes/host-keys", {}, True, True, True),
    ("post", "/api/v1/nodes/installations", {}, False, True, True),
    ("post", "/api/v1/nodes/installations/{key}/confirm", {"fingerprint": "x"}, False, True, True),
    ("post", "/api/v1/nodes/installations/{key}/act", {"action": "remove"}, False, True, True),
    ("post", "/api/v1/nodes/installations/{key}/abandon", {}, False, True, True),
    ("post", "/api/v1/nodes/installations/{key}/healing", {}, False, True, True),
    ("delete", "/api/v1/nodes/host-keys/{key}", {}, False, False, True),
    ("post", "/api/v1/models", {"name": "m", "folder": "/nowhere"}, False, True, True),
    ("get", "/api/v1/imports", {}, True, True, True),
    ("post", "/api/v1/imports", {}, False, True, True),
    ("post", "/api/v1/imports/{key}/cancel", {"reason": "x"}, False, True, True),
    ("post", "/api/v1/imports/{key}/retry", {"reason": "x"}, False, True, True),
    ("get", "/api/v1/models/{key}/weights", {}, True, True, True),
    ("post", "/api/v1/models/{key}/weights", {"action": "want"}, False, True, True),
    ("get", "/api/v1/models/{key}/compiled", {}, True, True, True),
    ("post", "/api/v1/models/{key}/compiled", {"engine": "vllm"}, False, True, True),
    ("delete", "/api/v1/models/{key}/compiled/{key}", {}, False, True, True),
    ("post", "/api/v1/models/{key}/prewarm", {"reason": "x"}, False, True, True),
    ("patch", "/api/v1/models/{key}/prewarm", {"paused": True}, False, True, True),
    ("delete", "/api/v1/models/{key}/prewarm", {}, False, True, True),
    ("post", "/api/v1/models/{key}/storage", {"storage": "node"}, False, True, True),
    ("post", "/api/v1/deployments", {}, False, True, True),
    ("patch", "/api/v1/deployments/{deployment}", {"replicas": 1}, False, True, True),
    ("delete", "/api/v1/deployments/{deployment}", {}, False, True, True),
    ("post", "/api/v1/replicas/{replica}/restart", {}, False, True, True),
    ("post", "/api/v1/replicas/{replica}/replace", {"reason": "x"}, False, True, True),
    ("get", "/api/v1/releases", {}, True, True, True),
    ("get", "/api/v1/validations", {}, True, True, True),
    ("post", "/api/v1/validations", {}, False, True, True),
    ("post", "/api/v1/validations/{key}/cancel", {"reason": "x"}, False, True, True),
    ("get", "/api/v1/starts", {}, True, True, True),
    ("get", "/api/v1/starts/now", {}, True, True, True),
    ("post", "/api/v1/starts/limits", {"reason": "x"}, False, True, True),
    ("get", "/api/v1/rollouts", {}, True, True, True),
    ("post", "/api/v1/rollouts/plan", {}, True, True, True),
    ("post", "/api/v1/rollouts", {}, False, True, True),
    ("post", "/api/v1/rollouts/{key}/approve", {"reason": "x"}, False, True, True),
    ("post", "/api/v1/rollouts/{key}/cancel", {"reason": "x"}, False, True, True),
    ("post", "/api/v1/rollouts/{key}/pause", {"reason": "x"}, False, True, True),
    ("post", "/api/v1/rollouts/{key}/resume", {"reason": "x"}, False, True, True),
    ("post", "/api/v1/rollouts/{key}/roll-back", {"reason": "x"}, False, True, True),
    ("post", "/api/v1/keys", {"name": "k", "scopes": ["inference"]}, False, True, True),
    ("post", "/api/v1/keys/{key}/revoke", {}, False, True, True),
    ("post", "/api/v1/keys/{key}/limits", {"reason": "trial"}, False, False, True),
]


@pytest.mark.django_db
def test_roles_may_do_what_the_table_says(
    as_role: Callable[[str], JsonClient], node: Node, deployment: Deployment
) -> None:
    ids = {"node": node.pk, "deployment": deployment.pk, "replica": uuid4(), "key": uuid4()}
    clients = {role: as_role(role) for role in ("viewer", "operator", "admin")}
    wrong = []
    for method, address, body, *allowed in ROLE_TABLE:
        for (role, client), may in zip(clients.items(), allowed, strict=True):
            answer = getattr(client, method)(address.format(**ids), body)
            # Whoever may is answered by the action itself, which may still say 400, 404 or 409.
            if (answer.status_code not in {401, 403}) != may:
                wrong.append(f"{role} {method} {address}: {answer.status_code}")
    assert wrong == []


def join_wish(text: str, **changes: object) -> dict[str, object]:
    wish = {"token": text, "node_id": str(uuid4()), "name": "n1", "hostname": "h", "address": "10.0.0.1"}
    return wish | {"agent_version": "0.1", "major": 1, "minor": 0} | changes


def new_token() -> str:
    return create_join_token(actor="test", now=clock.now())[1]


@pytest.mark.django_db
def test_node_joins_once_and_gets_the_key_that_controllers_derive(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    text = new_token()
    wish = join_wish(text, something_newer={"x": 1})
    answer = JsonClient().post(JOIN, wish)
    assert answer.status_code == 201, answer.json()
    body = answer.json()
    assert body == {
        "node_id": wish["node_id"],
        "name": "n1",
        "node_key": node_key(settings.ENV.fleet_secret, str(wish["node_id"]), 1).hex(),
        "key_epoch": 1,
        "redis_url": store_user.url_for(
            settings.ENV.agent_redis_url, str(wish["node_id"]), bytes.fromhex(body["node_key"])
        ),
    }
    assert answer["Cache-Control"] == "no-store"
    again = JsonClient().post(JOIN, join_wish(text, name="n2"))
    assert code_of(again) == (401, "denied")
    for secret in (text, body["node_key"]):
        assert secret not in caplog.text
        assert secret not in again.content.decode()
        assert secret not in str(list(Event.objects.values()) + list(JoinToken.objects.values()))


@pytest.mark.django_db
def test_taken_name_and_taken_identity_are_conflicts_that_spend_no_token() -> None:
    first = join_wish(new_token())
    assert JsonClient().post(JOIN, first).status_code == 201
    other = new_token()
    assert code_of(JsonClient().post(JOIN, join_wish(other))) == (409, "conflict")
    same = join_wish(other, node_id=first["node_id"], name="n2")
    assert code_of(JsonClient().post(JOIN, same)) == (409, "conflict")
    assert JsonClient().post(JOIN, join_wish(other, name="n2")).status_code == 201


@pytest.mark.django_db
@pytest.mark.parametrize(
    "change",
    [{"node_id": "x"}, {"name": ""}, {"name": "../etc"}, {"name": "a b"}, {"token": ""}, {"major": "one"}],
)
def test_join_request_that_is_wrong_is_refused_with_the_field(change: dict[str, object]) -> None:
    answer = JsonClient().post(JOIN, join_wish(new_token(), **change))
    assert code_of(answer) == (400, "invalid")
    assert list(answer.json()["error"]["fields"]) == list(change)


@pytest.mark.django_db
def test_tokens_cannot_be_tried_without_end() -> None:
    client = JsonClient(REMOTE_ADDR="192.0.2.1")
    codes = [client.post(JOIN, join_wish(f"xj-guess-{i}")).status_code for i in range(25)]
    assert codes == [401] * 20 + [429] * 5
    good = new_token()
    throttled = client.post(JOIN, join_wish(good))
    assert code_of(throttled) == (429, "throttled")
    assert 0 < int(throttled["Retry-After"]) <= 60
    assert JsonClient(REMOTE_ADDR="192.0.2.2").post(JOIN, join_wish(good)).status_code == 201


def test_bound_forgets_after_its_window_and_holds_few_addresses() -> None:
    now = [0.0]
    bound = RefusalBound(limit=2, window_seconds=10.0, max_keys=3, clock=lambda: now[0])
    for _ in range(2):
        bound.count_refusal("a")
    assert bound.wait_seconds("a") == 10.0
    assert bound.wait_seconds("b") == 0.0
    now[0] = 4.0
    assert bound.wait_seconds("a") == 6.0
    for address in ("b", "c", "d"):
        bound.count_refusal(address)
    assert bound.wait_seconds("a") == 0.0
    now[0] = 20.0
    assert bound.wait_seconds("b") == 0.0


@pytest.mark.django_db
def test_probes_answer_strangers_and_tell_nothing_else() -> None:
    for address in ("/healthz", "/readyz"):
        answer = Client().get(address)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert Client().post(address).status_code == HTTPStatus.METHOD_NOT_ALLOWED


def test_schema_is_valid_and_leaves_no_view_out(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    call_command("spectacular", file=file, format="openapi-json", validate=True, fail_on_warn=True)
    schema = json.loads(file.read_text())
    validate_schema(schema)  # type: ignore[no-untyped-call]  # drf_spectacular is untyped here
    assert {
        "/api/v1/nodes",
        "/api/v1/nodes/join-tokens",
        "/api/v1/nodes/{id}/cordon",
        "/api/v1/deployments/{id}/plan",
        "/api/v1/replicas/{id}/exit-log",
        "/api/v1/replicas/{id}/log",
        "/api/v1/keys/{id}/revoke",
        "/api/v1/agent/join",
    } <= set(schema["paths"])
    for address, takes_key in (("/api/v1/keys", True), ("/api/v1/deployments/{id}/plan", False)):
        names = {parameter["name"] for parameter in schema["paths"][address]["post"].get("parameters", [])}
        assert ("Idempotency-Key" in names) == takes_key, address
    assert "apiKey" in schema["components"]["securitySchemes"]
    assert "healthz" not in str(schema["paths"])


@pytest.mark.django_db
def test_schema_and_page_need_a_login_or_a_key(viewer: JsonClient) -> None:
    assert viewer.get("/api/v1/schema").json()["openapi"].startswith("3.")
    assert viewer.get("/api/v1/docs").status_code == 200
    assert code_of(JsonClient().get("/api/v1/schema")) == (401, "not_authenticated")
    to_login = Client().get("/api/v1/docs")
    assert (to_login.status_code, to_login["Location"]) == (302, "/login?next=/api/v1/docs")


@pytest.mark.django_db
def test_docs_page_runs_under_the_policy_and_offline() -> None:
    client = Client()
    client.force_login(make_user("v", "viewer"))
    page = client.get("/api/v1/docs")
    html = page.content.decode()
    assert "script-src 'self'" in page["Content-Security-Policy"]
    assert not re.search(r"<script(?![^>]*\bsrc=)", html), "an inline script"
    assert "<style" not in html
    addresses = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert len(addresses) == 5
    for address in addresses:
        assert address.startswith("/"), f"{address} is not served from here"
        if address.startswith("/" + settings.STATIC_URL.lstrip("/")):
            assert finders.find(address.removeprefix("/" + settings.STATIC_URL.lstrip("/")))
        else:
            script = client.get(address.replace("&amp;", "&"))
            assert script["Content-Type"].startswith("application/javascript")
            assert "SwaggerUIBundle" in script.content.decode()
            assert "validator.swagger.io" not in script.content.decode()
            assert '"validatorUrl": null' in script.content.decode()
