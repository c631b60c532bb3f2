"""What the web process shows to whom it does not know, and what it keeps out of records."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.http.response import HttpResponseBase
from django.test import Client

from exaserve_ops.audit.models import Event
from exaserve_ops.serving.models import Deployment
from tests.fakes.routes import all_routes
from tests.fakes.world import JsonClient, make_model

SECRET = "s3cr3t-Value-0123"

pytestmark = pytest.mark.django_db


def unframed(answer: HttpResponseBase) -> bool:
    policy = answer.headers.get("Content-Security-Policy", "")
    return (
        "frame-ancestors 'none'" in policy
        and answer.headers.get("X-Frame-Options") == "DENY"
        and answer.headers.get("X-Content-Type-Options") == "nosniff"
    )


def test_nothing_can_be_framed_or_sniffed_whoever_asks() -> None:
    signed_in = Client(raise_request_exception=False)
    signed_in.force_login(User.objects.create_superuser("root", password="a long enough password"))
    paths = {route.path for route in all_routes()} - {"/logout", "/admin/logout/"}
    loose = [
        (path, client is signed_in)
        for path in sorted(paths)
        for client in (Client(), signed_in)
        if not unframed(client.get(path))
    ]
    assert len(paths) > 100
    assert loose == []


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil127.0.0.1", "127.0.0.1@evil"]
)
def test_foreign_host_name_is_refused(host: str) -> None:
    refused = Client(SERVER_NAME=host).get("/login")
    assert refused.status_code == 400
    assert "not called what the address says" in refused.content.decode()
    assert Client(SERVER_NAME=host).get("/api/v1/nodes").status_code == 400
    assert Client().get("/login").status_code == 200


@pytest.mark.parametrize(
    "path", ["/metrics", "/debug", "/serveLogs", "/docs", "/openapi.json", "/invocations"]
)
def test_paths_that_other_servers_leave_open_are_not_there(path: str) -> None:
    stranger, signed_in = Client(), Client()
    signed_in.force_login(User.objects.create_superuser("root", password="a long enough password"))
    assert signed_in.get(path, follow=True).status_code == 404
    assert stranger.get(path, follow=True).redirect_chain[-1:] in ([], [(f"/login?next={path}/", 302)])
    assert stranger.post(path).status_code in {301, 403, 404}


@pytest.mark.parametrize(
    "options",
    [
        {"extra_arguments": f"--api-key {SECRET}"},
        {"extra_arguments": f"--max-num-seqs 4 --hf-token={SECRET}"},
        {"api_key": SECRET},
        {"HF_TOKEN": SECRET},
        {"note": "hf_AbCdEfGhIjKlMnOpQrStUvWx"},
    ],
)
def test_secret_among_engine_options_is_refused_and_kept_nowhere(
    operator: JsonClient, options: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    wish = {"name": "chat", "model": str(make_model().pk), "replicas": 1, "engine": "torch"}
    answer = operator.post("/api/v1/deployments", wish | {"engine_options": options})
    assert answer.status_code == 400, answer.json()
    assert f"engine_options.{next(iter(options))}" in answer.json()["error"]["fields"]
    for secret in (SECRET, "hf_AbCd"):
        assert secret not in answer.content.decode() + caplog.text + str(list(Event.objects.values()))
    assert not Deployment.objects.exists()
