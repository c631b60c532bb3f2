"""Pages of API keys and of sessions."""

from __future__ import annotations

import re
from typing import Any

from django.test import Client
from django.urls import reverse

from exaserve_ops.access.models import ApiKey
from exaserve_ops.sessions.domain.timeline import TurnMark, add_to_stays, add_turn
from exaserve_ops.sessions.models import InferenceSession
from tests.dashboard.conftest import World, addresses
from tests.fakes.world import make_user


def test_a_reload_of_the_answer_makes_no_second_key(operator: Client) -> None:
    shown = re.search(r'name="once" value="([\w-]+)"', operator.get(reverse("keys")).content.decode())
    assert shown is not None
    form = {"name": "load test", "scopes": ["inference"], "days": "7", "once": shown[1]}
    assert operator.post(reverse("keys"), form).status_code == 200
    assert operator.post(reverse("keys"), form).status_code == 302
    assert ApiKey.objects.count() == 1


def test_a_key_is_shown_once(operator: Client) -> None:
    made = operator.post(reverse("keys"), {"name": "load test", "scopes": ["inference"], "days": "7"})
    text = re.search(r"xo-[\w-]{40,}", made.content.decode())
    assert text is not None
    assert "no-store" in made["Cache-Control"]
    assert text[0] not in operator.get(reverse("keys")).content.decode()
    key = ApiKey.objects.get()
    assert key.expires_at is not None
    operator.post(reverse("key_revoke", args=[key.pk]))
    assert ApiKey.objects.get().revoked_at is not None


def test_the_key_of_somebody_else_cannot_be_revoked(operator: Client, world: World) -> None:
    assert operator.post(addresses(world)["key_revoke"]).status_code == 404
    assert ApiKey.objects.get(pk=world["key_id"]).revoked_at is None


def test_long_session_ids_are_cut_and_can_be_copied_whole(operator: Client, world: World) -> None:
    whole = "13000596-258d-442d-a39e-57b2cadc2613"
    InferenceSession.objects.filter(pk=world["pk"]).update(session_id=whole)
    page = operator.get(reverse("sessions")).content.decode()
    assert ">13000596-2…dc2613<" in page
    assert f'data-copy="{whole}"' in page


def test_limits_of_a_key_are_made_with_it_and_changed_by_who_manages_keys(
    operator: Client, world: World
) -> None:
    form = {"name": "trial", "scopes": ["inference"], "days": "7", "max_concurrent_requests": "4"}
    assert "4 requests at once; interactive" in operator.post(reverse("keys"), form).content.decode()
    assert "Limits…" not in operator.get(reverse("keys")).content.decode(), "not for its user"
    admin = Client()
    admin.force_login(make_user("keeper", "admin"))
    address = addresses(world)["key_limits"]
    wish = {"tokens_per_minute": "5000", "traffic_class": "batch", "reason": "nightly jobs"}
    page = admin.post(address, wish, follow=True).content.decode()
    assert "5,000 tokens a minute; batch" in page
    wrong = admin.post(address, {**wish, "tokens_per_minute": "0"}, follow=True).content.decode()
    assert "keeps its limits" in wrong
    assert ApiKey.objects.get(pk=world["key_id"]).tokens_per_minute == 5000


def test_session_page_shows_its_course_and_names_replicas_that_are_gone(
    operator: Client, world: World
) -> None:
    session = InferenceSession.objects.get(pk=world["pk"])
    here, gone = str(session.replica_id), "00000000-0000-4000-8000-000000000000"
    marks = [
        TurnMark(1.8e9 + n, 2.0, 0.1 * (n + 1), replica, why, outcome, 100, 64, 20)
        for n, (replica, why, outcome) in enumerate(
            [(gone, "new", "ok"), (here, "repinned", "ok"), (here, "sticky", "engine_error")]
        )
    ]
    marks.append(TurnMark(1.8e9 + 9, 1.0, None, "", "", "unavailable", None, None, None, attempts=3))
    two = {"attempts": 2, "continued_from": (gone,)}
    marks.append(TurnMark(1.8e9 + 12, 3.0, 0.1, here, "continued", "ok", 100, 64, 20, **two))  # type: ignore[arg-type] # both as they are named
    turns: list[list[Any]] = []
    stays: list[list[Any]] = []
    for mark in marks:
        turns = add_turn(turns, mark)
        stays = add_to_stays(stays, mark, "n1") if mark.replica_id else stays
    InferenceSession.objects.filter(pk=session.pk).update(latest_turns=turns, stays=stays)
    page = operator.get(reverse("session", args=[session.pk])).content.decode()
    assert page.count("<rect") == 5
    assert page.count("failed") >= 2, "a bar of a turn that failed is marked"
    assert "gone" in page
    assert "3 attempts" in page
    assert "one that is gone broke off" in page
    assert "2 attempts" not in page, "a break says more than a number"
    assert page.count("<tr>") == 2 + 5 + 2, "two heads, five turns, two stays"


def test_session_page_without_kept_turns_says_so(operator: Client, world: World) -> None:
    page = operator.get(reverse("session", args=[world["pk"]])).content.decode()
    assert "No turn is kept" in page


def test_sessions_are_found_by_their_node(operator: Client, world: World) -> None:
    InferenceSession.objects.filter(pk=world["pk"]).update(node_name="rack7-node3")
    assert "s-1" in operator.get(reverse("sessions"), {"q": "node3"}).content.decode()
    assert "Nothing matches" in operator.get(reverse("sessions"), {"q": "node4"}).content.decode()
