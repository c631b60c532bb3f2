"""The page of API keys in Chromium: what can be done to a key is in reach, wide and narrow."""

from __future__ import annotations

import pytest
from django.contrib.auth import get_user_model
from playwright.sync_api import Page, expect

from exaserve_ops.access.services import create_api_key
from tests.browser.conftest import Site
from tests.fakes.world import NOW

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", [1440, 390])
def test_no_action_of_a_key_is_cut_off(page: Page, site: Site, width: int) -> None:
    user = get_user_model().objects.get(username="olga")
    user.is_superuser = True  # may do all that there is to do to a key
    user.save()
    create_api_key(
        user=user, name="nightly-evaluation-of-models", scopes=["api", "inference"], actor="test", now=NOW
    )
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{site.url}/keys")
    panel = page.locator("#listing").bounding_box()
    assert panel is not None
    buttons = page.locator("#listing tbody .button:visible")
    expect(buttons).to_have_count(2)
    for at in range(buttons.count()):
        box = buttons.nth(at).bounding_box()
        assert box is not None
        assert panel["x"] <= box["x"]
        assert box["x"] + box["width"] <= panel["x"] + panel["width"]
