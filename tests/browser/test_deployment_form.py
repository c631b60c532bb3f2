"""The form of a new deployment follows its engine, and a pasted launch fills it in, in Chromium."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Complaints, Site
from tests.fakes.live_fleet import PaperFleet
from tests.fakes.world import make_model, make_node

pytestmark = pytest.mark.browser


def test_options_follow_the_engine_that_is_chosen_and_a_paste_fills_them_in(
    page: Page, site: Site, fleet: PaperFleet, complaints: Complaints
) -> None:
    node = make_node("gpu-1")
    node.engines = ["torch", "vllm"]
    node.engine_versions = {"vllm": "0.33.0"}
    node.save()
    make_model("llama")
    fleet.publish()
    page.goto(f"{site.url}/deployments/new")
    expect(page.locator("#engine-options")).to_contain_text("Options of Built-in (torch)")
    page.select_option("#id_engine", "vllm")
    expect(page.locator("#engine-options")).to_contain_text("Options of vLLM")
    page.locator("#engine-options summary", has_text="Lengths and batches").click()
    expect(page.locator("[name=o-max_model_len]")).to_be_visible()

    page.goto(f"{site.url}/deployments/import")
    page.fill(
        "[name=text]", "vllm serve org/llama -tp=2 --max_model_len=8k --swap-space 4 --port 80 --api-key K1"
    )
    page.locator("button", has_text="Read it").click()
    expect(page.locator("[name=o-max_model_len]")).to_have_value("8000")
    expect(page.locator("#id_model")).to_contain_text("llama")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert complaints == []
