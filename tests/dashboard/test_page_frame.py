"""What all pages have in common: frame, policy, titles, search, addresses, texts from outside."""

from __future__ import annotations

import re
from typing import Any

from django.test import Client
from django.urls import reverse

from exaserve_ops.inventory.models import Node
from exaserve_ops.sessions.models import InferenceSession
from tests.dashboard.conftest import World, addresses


def test_no_page_has_inline_script_or_style(operator: Client, world: World) -> None:
    for name, address in addresses(world).items():
        answer = operator.get(address)
        if not answer["Content-Type"].startswith("text/html"):
            continue
        text = answer.content.decode()
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=\"|<script(?![^>]*\ssrc=)", text), name
        assert "script-src 'self'" in answer["Content-Security-Policy"], name


def test_the_title_says_the_state(operator: Client, world: World) -> None:
    Node.objects.update(liveness="dead", liveness_reason="3 heartbeats in a row are missing")
    assert "<title>1 dead · Fleet" in operator.get("/").content.decode()
    page = operator.get(addresses(world)["node"]).content.decode()
    assert "3 heartbeats in a row are missing" in page


def test_empty_pages_say_what_to_do_first(operator: Client) -> None:
    assert "make up" in operator.get(reverse("nodes")).content.decode()
    assert "No node has joined" in operator.get(reverse("fleet")).content.decode()
    assert "No model is registered" in operator.get(reverse("models")).content.decode()
    assert "Register a model first" in operator.get(reverse("deployment_new")).content.decode()


def test_the_theme_is_painted_by_the_server_from_the_first_pixel(operator: Client) -> None:
    operator.cookies["theme"] = "dark"
    assert '<html lang="en" data-theme="dark">' in operator.get("/").content.decode()
    operator.cookies["theme"] = '"><script>'
    assert '<html lang="en">' in operator.get("/").content.decode()


def test_an_address_with_a_slash_too_many_leads_to_the_page(operator: Client) -> None:
    answer = operator.get("/nodes/?state=dead")
    assert (answer.status_code, answer["Location"]) == (302, "/nodes?state=dead")
    assert operator.get("/nonsense/").status_code == 404
    assert operator.get("/", PATH_INFO="//evil.example/nodes/").status_code == 404
    assert operator.get("/favicon.ico")["Location"].endswith("/img/icon.svg")
    assert Client().get("/favicon.ico").status_code == 302


def test_a_phone_has_four_entries_and_the_rest_behind_more(operator: Client) -> None:
    page = operator.get(reverse("events")).content.decode()
    bar, rest = page.split('id="more-pages"')
    assert bar.count('class="entry"') == 4
    assert 'aria-current="page"' in rest
    assert 'class="more here"' in bar
    assert 'class="more"' in operator.get(reverse("fleet")).content.decode()


def test_search_finds_by_name_and_id_only_what_the_user_may_see(operator: Client, world: World) -> None:
    assert "gpu-1" in operator.get(reverse("search"), {"q": "GPU-"}).content.decode()
    page = operator.get(reverse("search"), {"q": str(world["replica_id"])}).content.decode()
    assert reverse("replica", args=[world["replica_id"]]) in page
    assert "Nothing is named" in operator.get(reverse("search"), {"q": "zzz"}).content.decode()


def test_text_from_outside_is_shown_as_text(operator: Client, world: World) -> None:
    Node.objects.update(liveness="dead", liveness_reason="<script>alert(1)</script>")
    InferenceSession.objects.update(session_id="<img src=x onerror=alert(1)>")
    for page in ("fleet", "nodes", "node", "sessions", "session"):
        text = operator.get(addresses(world)[page]).content.decode()
        assert "<script>alert" not in text, page
        assert "<img src=x" not in text, page


def test_the_layout_is_answered_whole_and_only_when_there_is_one(operator: Client, reader: Any) -> None:
    assert operator.get(reverse("live_layout")).status_code == 404
    reader.layout = b'{"version": 3}'
    assert operator.get(reverse("live_layout")).json() == {"version": 3}


def test_static_plotly_comes_from_the_wheel_and_nothing_else_does() -> None:
    from django.contrib.staticfiles import finders  # noqa: PLC0415 - reads settings at import

    assert finders.find("vendor/plotly.min.js")
    assert finders.find("vendor/widgetbundle.js") is None
    assert finders.find("vendor/../__init__.py") is None
