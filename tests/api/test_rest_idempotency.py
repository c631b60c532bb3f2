"""The same POST sent twice acts once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from exaserve_ops.access.models import ApiKey, IdempotencyRecord
from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import JoinToken, Node
from exaserve_ops.serving.models import Deployment
from tests.fakes.world import JsonClient, client_with_key, make_model, make_user

KEY: dict[str, Any] = {"HTTP_IDEMPOTENCY_KEY": "a-key"}


def wish(**changes: object) -> dict[str, object]:
    return {"name": "chat", "model": str(make_model().pk), "replicas": 2, "engine": "torch"} | changes


@pytest.mark.django_db
def test_repeated_post_is_answered_alike_and_acts_once(operator: JsonClient) -> None:
    body = wish()
    first = operator.post("/api/v1/deployments", body, **KEY)
    again = operator.post("/api/v1/deployments", dict(reversed(body.items())), **KEY)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert "Idempotency-Replayed" not in first
    assert again["Idempotency-Replayed"] == "true"
    assert Deployment.objects.count() == 1


@pytest.mark.django_db
def test_key_of_another_request_is_refused(operator: JsonClient, node: Node) -> None:
    operator.post("/api/v1/deployments", wish(), **KEY)
    other = operator.post("/api/v1/deployments", wish(name="other"), **KEY)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    elsewhere = operator.post(f"/api/v1/nodes/{node.pk}/cordon", {"reason": "x"}, **KEY)
    assert elsewhere.status_code == 422
    node.refresh_from_db()
    assert not node.cordoned


@pytest.mark.django_db
def test_keys_of_two_people_do_not_meet(operator: JsonClient, as_role: Callable[[str], JsonClient]) -> None:
    assert operator.post("/api/v1/deployments", wish(), **KEY).status_code == 201
    other = as_role("operator").post("/api/v1/deployments", wish(name="other"), **KEY)
    assert other.status_code == 201


@pytest.mark.django_db
def test_refusal_is_not_kept(operator: JsonClient) -> None:
    assert operator.post("/api/v1/deployments", wish(replicas=-1), **KEY).status_code == 400
    assert not IdempotencyRecord.objects.exists()
    assert operator.post("/api/v1/deployments", wish(), **KEY).status_code == 201


@pytest.mark.django_db
@pytest.mark.parametrize("key", ["", "x" * 201, "tab\there", "é"])
def test_unusable_key_is_refused(operator: JsonClient, key: str) -> None:
    answer = operator.post("/api/v1/deployments", wish(), HTTP_IDEMPOTENCY_KEY=key)
    assert answer.status_code == 400
    assert list(answer.json()["error"]["fields"]) == ["Idempotency-Key"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("address", "body", "secret_field", "model"),
    [
        ("/api/v1/keys", {"name": "ci", "scopes": ["inference"]}, "key", ApiKey),
        ("/api/v1/nodes/join-tokens", {"note": "rack 1"}, "token", JoinToken),
    ],
)
def test_secret_is_neither_kept_nor_shown_twice(
    operator: JsonClient,
    address: str,
    body: dict[str, object],
    secret_field: str,
    model: type[ApiKey | JoinToken],
) -> None:
    before = model.objects.count()
    first = operator.post(address, body, **KEY)
    assert first.status_code == 201, first.json()
    assert first["Cache-Control"] == "no-store"
    secret = first.json()[secret_field]
    again = operator.post(address, body, **KEY)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "already_answered")
    assert secret not in again.content.decode()
    assert model.objects.count() == before + 1
    assert secret not in str(list(IdempotencyRecord.objects.values()))
    assert secret not in str(list(Event.objects.values()))
    listed = operator.get(address).content.decode()
    assert secret not in listed


@pytest.mark.django_db(transaction=True)
def test_copies_sent_at_the_same_time_act_once() -> None:
    user, body = make_user("op", "operator"), wish()
    clients = [client_with_key(user) for _ in range(4)]
    start = threading.Barrier(len(clients))
    answers: list[tuple[int, str]] = []

    def send(client: JsonClient) -> None:
        try:
            start.wait(timeout=10)
            answer = client.post("/api/v1/deployments", body, **KEY)
            answers.append((answer.status_code, answer.json()["id"]))
        finally:
            connection.close()

    threads = [threading.Thread(target=send, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(answers) == len(clients)
    assert len(set(answers)) == 1
    assert Deployment.objects.count() == 1
    assert Event.objects.filter(subject_kind="deployment").count() == 1
