"""What lists of the pages say of a filter that they do not have."""

from __future__ import annotations

from django.test import Client
from django.urls import reverse

from tests.dashboard.conftest import OPEN_TO_ALL, World, addresses

_LEAST_LISTS = 14


def test_every_list_says_that_a_filter_is_none_of_its_own(viewer: Client, world: World) -> None:
    lists = 0
    for name, address in addresses(world).items():
        if name in OPEN_TO_ALL | {"styleguide"}:
            continue
        answer = viewer.get(address)
        is_page = answer.status_code == 200 and b"<!doctype html>" in answer.content
        if not is_page or "listing" not in answer.context:
            continue
        lists += 1
        own = {f.name for f in answer.context["listing"].filters}
        assert "of this list" not in answer.content.decode(), name
        page = viewer.get(address, {"livenes": "dead", "page": 1}).content.decode()
        assert "“livenes” is no filter of this list, and nothing was left out for it." in page, name
        assert all(known in page for known in own), name
    assert lists >= _LEAST_LISTS


def test_filters_that_a_list_has_are_told_and_what_else_its_page_reads_is_none_of_them(
    viewer: Client,
) -> None:
    page = viewer.get(reverse("deployments"), {"b": 1, "a": "<i>", "x" * 60: 1, "c": 1, "model": "m"})
    said = page.content.decode()
    assert "“a”, “b”, “c” are no filters of this list" in said
    assert "There are: model, q." in said
    known = viewer.get(reverse("events"), {"show": "problems", "subject": "x", "kind": "node", "q": "y"})
    assert "of this list" not in known.content.decode()
