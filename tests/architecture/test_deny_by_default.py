"""Every route and every socket refuses strangers, unless it stands on the short list here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpResponseBase
from django.test import Client
from django.urls import URLPattern, reverse

from exaserve_ops.dashboard.live.handshake import GuardedSocket, Send
from exaserve_ops.dashboard.routing import websocket_urlpatterns
from tests.fakes.routes import Route, all_routes, sample
from tests.fakes.world import JsonClient, client_with_key, make_user

PUBLIC = {
    "favicon": "leads to the icon, which is a static file",
    "login": "where a login begins",
    "admin:login": "the same, of the admin",
    "healthz": "says that the process answers, nothing else",
    "readyz": "says whether the database answers, nothing else",
    "api-join": "the join token in the body is the credential",
}
"""Routes for strangers, and why. Whoever adds one says so here."""

OWN = {
    "without-slash": "leads to the same address without its slash",
    "admin:logout": "ends one's own login",
    "logout": "ends one's own login",
    "styleguide": "shows what controls look like, on made-up data",
    "search": "finds what the caller may see",
    "api-schema": "describes REST; shows no data",
    "api-docs": "describes REST; shows no data",
    "api-unknown": "says that there is nothing",
}
"""Routes for whoever is signed in, whatever their rights, and why."""

METHODS = ("get", "post", "delete")
REST_METHODS = (*METHODS, "put", "patch", "options")
FIRST_SIGN_IN = {"/login", "/admin/login/"}

ROUTES = all_routes()


Answer = HttpResponseBase


def full_name(route: Route) -> str:
    return f"admin:{route.name}" if route.path.startswith("/admin/") else route.name


REST = [r for r in ROUTES if r.path.startswith("/api/") and full_name(r) not in PUBLIC]


def refuses(answer: Answer) -> bool:
    """401, 403, a method that is not there, or the way to the login."""
    if answer.status_code in {401, 403, 405}:
        return True
    target = answer.headers.get("Location", "")
    return answer.status_code == 302 and target.partition("?")[0] in FIRST_SIGN_IN


def answers(client: Client, route: Route) -> dict[str, Answer]:
    return {
        method: getattr(client, method)(route.path)
        for method in (REST_METHODS if "/api/" in route.path else METHODS)
    }


def let_in(client: Client, route: Route) -> list[str]:
    """What a client was let in to by each method that the route has."""
    got = answers(client, route)
    assert any(a.status_code != 405 for a in got.values()), f"{route} answers no method at all"
    return [f"{method.upper()} {route}: {a.status_code}" for method, a in got.items() if not refuses(a)]


def test_the_walk_reaches_pages_rest_and_admin() -> None:
    paths = {route.path for route in ROUTES}
    assert {"/", "/api/v1/deployments", "/admin/serving/replica/", reverse("login")} <= paths
    assert len(paths) > 100


@pytest.mark.django_db
def test_strangers_are_refused() -> None:
    guarded = [route for route in ROUTES if full_name(route) not in PUBLIC]
    client = Client()
    assert [line for route in guarded for line in let_in(client, route)] == []


@pytest.mark.django_db
@pytest.mark.parametrize("token", ["0" * 32, "xo-" + "a" * 43, "", "null", "é"])
def test_random_tokens_are_refused(token: str) -> None:
    client = Client(headers={"Authorization": f"Bearer {token}"})
    guarded = [route for route in ROUTES if full_name(route) not in PUBLIC]
    believed = [str(route) for route in guarded if not refuses(client.get(route.path))]
    assert believed == []


@pytest.mark.django_db
def test_a_login_without_rights_opens_nothing() -> None:
    client = Client()
    client.force_login(make_user("newcomer"))
    guarded = [route for route in ROUTES if full_name(route) not in PUBLIC | OWN]
    assert [line for route in guarded for line in let_in(client, route)] == []


@pytest.mark.django_db
def test_key_for_inference_does_not_open_rest() -> None:
    superuser = User.objects.create_superuser("root", password="a long enough password")
    client = client_with_key(superuser, scopes=("inference",))
    for route in REST:
        assert {a.status_code for a in answers(client, route).values()} <= {401, 302, 405}, route
    assert client_with_key(superuser).get("/api/v1/nodes").status_code == 200


def test_lists_of_exceptions_name_routes_that_exist() -> None:
    names = {full_name(route) for route in ROUTES}
    assert set(PUBLIC) <= names
    assert set(OWN) <= names


@pytest.mark.django_db
def test_route_without_a_policy_is_caught() -> None:
    """The walk itself can fail: the public route that joins nodes would not pass it."""
    [join] = [route for route in ROUTES if route.name == "api-join"]
    assert let_in(JsonClient(), join) == [f"POST {join}: 400"]


@pytest.mark.django_db
def test_unsafe_requests_of_a_browser_need_its_csrf_token() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user("op", "operator"))
    for route in ROUTES:
        if full_name(route) in PUBLIC or route.path.startswith("/admin/"):
            continue
        got = client.post(route.path, content_type="application/json", data="{}")
        assert got.status_code in {401, 403, 405}, f"{route} took a POST of a foreign page"


async def welcome(scope: object, receive: object, send: Send) -> None:  # noqa: ARG001 - ASGI's signature
    """Stands behind the guards in place of the live sockets, so that only the guards are tried."""
    await send({"type": "websocket.accept"})


def socket_paths() -> list[str]:
    return ["/" + sample(entry.pattern) for entry in websocket_urlpatterns]


def is_admitted(path: str, headers: list[tuple[bytes, bytes]]) -> bool:
    routes = [
        URLPattern(entry.pattern, GuardedSocket(welcome, permissions=guard._permissions))
        for entry in websocket_urlpatterns
        if isinstance(guard := entry.callback, GuardedSocket)
    ]
    assert len(routes) == len(websocket_urlpatterns), "a socket without a guard"
    application = AuthMiddlewareStack(URLRouter(routes))

    async def connect() -> bool:
        host = [(b"host", b"127.0.0.1")]
        scope = {"type": "websocket", "path": path, "query_string": b"", "headers": host + headers}
        socket: Any = ApplicationCommunicator(application, scope)  # type: ignore[no-untyped-call]  # asgiref is untyped here
        await socket.send_input({"type": "websocket.connect"})
        answer = await socket.receive_output(timeout=10)
        await socket.wait(timeout=10)
        return bool(answer["type"] == "websocket.accept")

    return asyncio.run(connect())


def cookie_of(user: User) -> tuple[bytes, bytes]:
    client = Client()
    client.force_login(user)
    name = settings.SESSION_COOKIE_NAME
    return (b"cookie", f"{name}={client.cookies[name].value}".encode())


@pytest.mark.django_db(transaction=True)
def test_sockets_refuse_strangers_foreign_origins_and_random_tokens() -> None:
    own = (b"origin", settings.ENV.origin.encode())
    cookie = cookie_of(User.objects.create_superuser("root", password="a long enough password"))
    powerless = cookie_of(make_user("newcomer"))
    attempts = {
        "a stranger": [own],
        "nobody at all": [],
        "a random token": [(b"authorization", b"Bearer xo-nonsense")],
        "a random cookie": [own, (b"cookie", b"sessionid=nonsense")],
        "a foreign page": [(b"origin", b"https://evil.example"), cookie],
        "a page of a longer name": [(b"origin", own[1] + b".evil.example"), cookie],
        "a page of another port": [(b"origin", own[1].rpartition(b":")[0] + b":1"), cookie],
        "a login without an origin": [cookie],
        "a login without rights": [own, powerless],
    }
    assert socket_paths()
    for path in socket_paths():
        for who, headers in attempts.items():
            assert not is_admitted(path, headers), f"{path} let in {who}"
    assert is_admitted(socket_paths()[0], [own, cookie]), (
        "nobody at all was let in, so the refusals above prove nothing"
    )
