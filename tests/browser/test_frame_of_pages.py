"""What surrounds and carries the pages, in Chromium: bottom bar, bell, ended logins, spared repaints."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import Permission, User
from playwright.sync_api import Page, expect

from tests.browser.conftest import Complaints, Site, open_live
from tests.fakes.live_fleet import PaperFleet

pytestmark = pytest.mark.browser

PHONE = {"width": 390, "height": 844}
FIRST_MAP = "[data-map='1']"


def _heights(page: Page) -> list[float]:
    return [
        float(h) for h in page.evaluate("[...document.querySelectorAll('.map')].map((m) => m.offsetHeight)")
    ]


def test_a_phone_reaches_every_page_by_the_bar_or_its_sheet(
    page: Page, site: Site, fleet: PaperFleet, complaints: Complaints
) -> None:
    page.set_viewport_size({"width": PHONE["width"], "height": PHONE["height"]})
    open_live(page, site, fleet)
    more = page.locator("[data-more]")
    shown = page.locator(".rail a.entry:visible, .rail [data-more]:visible")
    assert shown.count() == 5
    for box in [shown.nth(index).bounding_box() for index in range(5)]:
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["width"]
    expect(more).to_have_attribute("aria-expanded", "false")
    more.focus()
    page.keyboard.press("Enter")
    expect(more).to_have_attribute("aria-expanded", "true")
    expect(page.locator("#more-pages a").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#more-pages")).to_be_hidden()
    expect(more).to_be_focused()
    more.click()
    page.locator("#more-pages a", has_text="Events").click()
    page.wait_for_url("**/events")
    expect(more).to_have_class(re.compile("here"))
    assert complaints == []


def test_the_bell_counts_live_and_leads_to_the_problems(page: Page, site: Site, fleet: PaperFleet) -> None:
    open_live(page, site, fleet)
    count = page.locator("[data-problem-count]")
    expect(count).to_be_hidden()
    fleet.problems = 2
    fleet.publish()
    expect(count).to_have_text("2")
    page.locator("[data-bell]").click()
    expect(page).to_have_url(re.compile("#problems$"))


def test_a_page_whose_login_ended_becomes_the_login_page(page: Page, site: Site, fleet: PaperFleet) -> None:
    open_live(page, site, fleet)
    page.context.clear_cookies()
    page.evaluate(
        "import('/static/js/live.js').then(({ liveLink }) => liveLink().lost({ code: 4401, reason: '' }))"
    )
    expect(page.locator("[name=username]")).to_be_visible()
    assert "/login?next=/" in page.url


def test_a_small_fleet_gets_large_cells_and_no_void(page: Page, site: Site, fleet: PaperFleet) -> None:
    open_live(page, site, fleet)
    small = _heights(page)
    assert small[0] == small[1]
    stage = page.locator(f"{FIRST_MAP} [data-stage]").bounding_box()
    assert stage is not None
    assert stage["height"] <= 20 + 2 * 24 + 3 * 48, "higher than three lines, two racks and the slots"
    page.locator(f"{FIRST_MAP} [data-cells]").focus()
    page.keyboard.press("Control+Home")
    cell = page.locator(f"{FIRST_MAP} [data-cell]").bounding_box()
    assert cell is not None
    assert cell["height"] == 48
    assert cell["width"] > 150
    fleet.reshape(256, 12)
    fleet.publish()
    expect(page.locator(f"{FIRST_MAP} [data-map-size]")).to_have_text(re.compile("256"))
    assert _heights(page)[0] > small[0]
    assert _heights(page)[0] == _heights(page)[1]


def test_words_in_cells_are_readable_on_every_colour(page: Page, site: Site) -> None:
    page.goto(site.url)
    worst = page.evaluate(
        """async () => {
          const { inkOn, colourOf, luminance } = await import("/static/js/cellpaint.js");
          const inks = { "#000000": 0, "#ffffff": 1 };
          let worst = 21;
          for (const scale of ["cividis", "viridis"]) {
            for (let level = 0; level < 256; level += 1) {
              const [colour, ink] = [luminance(colourOf(scale, level)), inks[inkOn(scale, level)]];
              worst = Math.min(worst, (Math.max(colour, ink) + 0.05) / (Math.min(colour, ink) + 0.05));
            }
          }
          return worst;
        }"""
    )
    assert worst >= 4.5


def test_frames_that_look_alike_are_painted_once(page: Page, site: Site, fleet: PaperFleet) -> None:
    open_live(page, site, fleet)
    page.evaluate(
        """() => {
          window.painted = 0;
          const restyle = window.Plotly.restyle;
          window.Plotly.restyle = (...given) => { window.painted += 1; return restyle(...given); };
        }"""
    )
    for value in (0.5, 0.5, 0.5001, 0.95):
        fleet.publish(lambda _cell, value=value: value)
        at = f"{value:.4f}"
        page.wait_for_function(
            """async (at) => {
              const { liveLink } = await import("/static/js/live.js");
              return (liveLink().frame.codes[0][0] * 0.0001).toFixed(4) === at;
            }""",
            arg=at,
        )
    page.wait_for_function("window.painted > 0")
    assert page.evaluate("window.painted") <= 2, "once for each map, for the one value that looks different"


def test_who_may_not_see_what_is_live_is_told_so_and_of_no_lost_connection(
    page: Page, site: Site, complaints: Complaints
) -> None:
    olga = User.objects.get(username="olga")
    olga.groups.clear()
    olga.user_permissions.add(Permission.objects.get(codename="view_model"))
    sockets: list[str] = []
    page.on("websocket", lambda socket: sockets.append(socket.url))
    page.goto(f"{site.url}/models")
    expect(page.locator("[data-live]")).to_have_text("not live")
    page.wait_for_load_state("networkidle")
    expect(page.locator("[data-banner]")).to_be_hidden()
    assert sockets == []
    assert complaints == []
