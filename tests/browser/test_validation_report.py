"""The report of a validation in Chromium: its curves can be told apart, and fit a phone."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from exaserve_ops.validation.domain.asking import Finding
from exaserve_ops.validation.domain.lifecycle import PASSED
from exaserve_ops.validation.models import Validation
from exaserve_ops.validation.services import (
    ValidationWish,
    advance_validation,
    ask_validation,
    record_finding,
)
from tests.browser.conftest import Complaints, Site
from tests.fakes.world import NOW, make_model, make_node

pytestmark = pytest.mark.browser

FIGURE = ".validation-figure"
ENGINES = ("torch", "simulated")
PANELS = 4


@pytest.fixture
def validation(site: Site) -> Validation:
    assert site.url
    make_node("gpu-1")
    wish = ValidationWish(make_model("a-model").pk, ENGINES)
    made = ask_validation(wish, reason="new weights", actor="user:olga", now=NOW)
    advance_validation(made.pk, "start", why="", actor="test", now=NOW)
    for check in made.checks.filter(name__in=["concurrency", "context"]):
        levels = [
            {
                "at_once": n,
                "tokens_per_second": 90.0 * n,
                "ttft_p95_seconds": 0.03 * n,
                "itl_seconds": 0.01 * n,
            }
            for n in (1, 2, 4, 8)
        ]
        curve = [{"tokens": n, "ttft_seconds": n / 9000} for n in (512, 1024, 2048)]
        why = "every word of it is to be read, however many there are: " * 6
        finding = Finding(PASSED, why=why, details={"levels": levels, "curve": curve})
        record_finding(made, check.position, finding, now=NOW)
    return made


def test_curves_stand_below_one_another_on_a_phone_and_say_whose_they_are(
    page: Page, site: Site, validation: Validation, complaints: Complaints
) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{site.url}/validations/{validation.pk}")
    titles = page.locator(f"{FIGURE} .annotation-text")
    expect(titles).to_have_count(PANELS)
    boxes = [box for title in titles.all() if (box := title.bounding_box()) is not None]
    assert len({round(box["x"]) for box in boxes}) == 1, "one column"
    tops = [box["y"] for box in boxes]
    assert tops == sorted(set(tops))
    figure = page.locator(FIGURE).bounding_box()
    assert figure is not None
    labels = page.locator(f"{FIGURE} .ytick text")
    for label in labels.all():
        box = label.bounding_box()
        assert box is not None
        assert box["x"] >= figure["x"], "no number is cut off"
    assert page.evaluate("document.documentElement.scrollWidth") == 390, "nothing runs off sideways"
    keys = page.locator(".engine-keys li")
    assert keys.all_text_contents() == list(ENGINES)
    drawn = page.locator(f"{FIGURE} .scatterlayer path.js-line").first
    colour = "element => getComputedStyle(element, {pseudo}).{name}"
    key = colour.replace("{pseudo}", "'::before'").replace("{name}", "backgroundColor")
    line = colour.replace("{pseudo}", "null").replace("{name}", "stroke")
    assert keys.first.evaluate(key) == drawn.evaluate(line)
    assert complaints == []


def test_what_was_found_is_not_cut_off(page: Page, site: Site, validation: Validation) -> None:
    page.goto(f"{site.url}/validations/{validation.pk}")
    why = page.get_by_text("every word of it").first
    cell = why.locator("xpath=..")
    expect(why).to_be_visible()
    assert cell.evaluate("cell => cell.scrollHeight <= cell.clientHeight + 1")
    assert why.evaluate("element => getComputedStyle(element).display") == "inline"
