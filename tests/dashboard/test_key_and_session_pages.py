"""Pages of API keys and of sessions."""

from __future__ import annotations

import re

from django.test import Client
from django.urls import reverse

from exaserve_ops.access.models import ApiKey
from exaserve_ops.sessions.models import InferenceSession
from tests.dashboard.conftest import World, addresses


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
