"""Where nodes have no Redis users of their own, the pages that add nodes say what that means."""

from __future__ import annotations

import dataclasses

import pytest
from django.conf import LazySettings
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

NOTICE = "All nodes share one Redis password"

pytestmark = pytest.mark.django_db


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("page", ["nodes", "node_join", "installation_new"])
def test_pages_that_add_nodes_warn_of_a_shared_password_and_only_then(
    page: str, settings: LazySettings
) -> None:
    client = Client()
    client.force_login(User.objects.create_superuser("root", password="a long enough password"))
    assert NOTICE not in client.get(reverse(page)).content.decode()
    settings.ENV = dataclasses.replace(settings.ENV, redis_node_users=False)
    assert NOTICE in client.get(reverse(page)).content.decode()
