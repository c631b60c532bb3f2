"""The fleet page in Chromium: what an operator sees move, hover, focus and come back."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Page, expect

from exaserve_ops.inventory.models import NodeHardware
from exaserve_ops.serving.services.replicas import create_replicas
from tests.browser.conftest import Complaints, Site, open_live, wait_until_live
from tests.fakes.live_fleet import PaperFleet
from tests.fakes.world import NOW, make_deployment, make_model, make_node
from workers.simulation.hardware import make_topology

pytestmark = pytest.mark.browser

PICTURE = "(map) => document.querySelector(`${map} [data-plot] image`)?.href.baseVal"
FIRST_MAP = "[data-map='1']"
LEVEL_AT_AGE = """async (seconds) => {
  const { liveLink } = await import("/static/js/live.js");
  const link = liveLink();
  link.clockOffset += seconds - link.frameAge();
  link.say();
  return document.querySelector("[data-live]").dataset.level;
}"""
"""How the newest frame looks at an age: without waiting, for a busy machine would miss it."""


def _picture(page: Page) -> Any:
    return page.evaluate(PICTURE, FIRST_MAP)


def _point(page: Page, row: int = 0, slot: int = 0, *, fleet: PaperFleet) -> None:
    """Move the pointer into a cell, found as the page itself says where it is."""
    page.locator(f"{FIRST_MAP} [data-cells]").focus()
    page.keyboard.press("Control+Home")
    for key, times in (("ArrowDown", row), ("ArrowRight", slot)):
        for _ in range(times):
            page.keyboard.press(key)
    box = page.locator(f"{FIRST_MAP} [data-cell]").bounding_box()
    assert box is not None
    assert fleet.rows > row
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def test_the_heatmap_moves_when_a_frame_does(
    page: Page, site: Site, fleet: PaperFleet, complaints: Complaints
) -> None:
    open_live(page, site, fleet)
    before = _picture(page)
    fleet.publish(lambda _cell: 0.95)
    assert before
    page.wait_for_function(f"([map, old]) => ({PICTURE})(map) !== old", arg=[FIRST_MAP, before])
    assert page.locator(f"{FIRST_MAP} [data-plot] svg.main-svg").count() >= 1
    assert page.evaluate("document.querySelectorAll('.js-plotly-plot').length") == 2
    assert complaints == []


def test_figures_follow_the_summary(page: Page, site: Site, fleet: PaperFleet) -> None:
    open_live(page, site, fleet)
    expect(page.locator("[data-bind='nodes.alive']")).to_have_text("3")
    expect(page.locator("[data-bind='ttft_seconds.p95']")).to_have_text("\u2013")
    fleet.reshape(4, 2)
    fleet.publish()
    expect(page.locator("[data-bind='nodes.alive']")).to_have_text("4")


def test_a_fleet_that_changes_shape_under_the_pointer_raises_nothing(
    page: Page, site: Site, fleet: PaperFleet, complaints: Complaints
) -> None:
    fleet.reshape(256, 12)
    open_live(page, site, fleet)
    size = page.locator(f"{FIRST_MAP} [data-map-size]")
    expect(size).to_have_text("256 nodes \u00d7 12 slots")
    _point(page, 200, 11, fleet=fleet)
    for rows, columns in ((3, 2), (0, 0), (256, 12), (1, 1)):
        fleet.reshape(rows, columns)
        fleet.publish()
        expect(size).to_have_text(re.compile(f"^{rows} nodes? \u00d7 {columns} slots$"))
        page.mouse.move(400, 500)
        page.mouse.move(420, 520)
    assert page.evaluate("document.querySelectorAll('.js-plotly-plot').length") <= 2
    assert complaints == []


def test_missing_stale_and_nan_are_never_painted_as_a_value(
    page: Page, site: Site, fleet: PaperFleet
) -> None:
    values: dict[int, float | None] = {0: None, 1: float("nan"), 2: 0.0}
    open_live(page, site, fleet)
    fleet.publish(lambda cell: values.get(cell, 0.5))
    page.wait_for_function(
        f'() => document.querySelector("{FIRST_MAP} [data-plot]").data?.[0]?.z.flat().includes(0)'
    )
    z = page.evaluate(f'document.querySelector("{FIRST_MAP} [data-plot]").data[0].z.flat()')
    assert sum(value == 0 for value in z) == 1
    _point(page, 0, 0, fleet=fleet)
    expect(page.locator("[data-tip]")).to_contain_text("KV pool used: no data")
    _point(page, 0, 1, fleet=fleet)
    expect(page.locator("[data-tip]")).to_contain_text("NaN")
    _point(page, 1, 0, fleet=fleet)
    expect(page.locator("[data-tip]")).to_contain_text("0\u202f%")


def test_the_keyboard_reaches_cells_and_says_what_they_hold(
    page: Page, site: Site, fleet: PaperFleet
) -> None:
    open_live(page, site, fleet)
    page.locator(f"{FIRST_MAP} [data-map-metric]").focus()
    page.keyboard.press("Tab")
    cells = page.locator(f"{FIRST_MAP} [data-cells]")
    expect(cells).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    cell = page.locator(f"{FIRST_MAP} [data-cell]")
    expect(cell).to_have_attribute("aria-label", re.compile("chat-1-1, KV pool used: 50"))
    assert cells.get_attribute("aria-activedescendant") == cell.get_attribute("id")
    for _ in range(9):
        page.keyboard.press("ArrowDown")
    expect(cell).to_have_attribute("aria-label", re.compile("chat-2-1"))


def test_the_drawer_opens_shares_its_address_and_gives_the_focus_back(
    page: Page, site: Site, fleet: PaperFleet, complaints: Complaints
) -> None:
    replica = create_replicas(make_deployment().pk, 1, why="1 of 2", actor="test", now=NOW)[0]
    fleet.replica_ids[0] = str(replica.pk)
    open_live(page, site, fleet)
    page.locator(f"{FIRST_MAP} [data-cells]").focus()
    page.keyboard.press("Control+Home")
    page.keyboard.press("Enter")
    drawer = page.locator("[data-drawer]")
    expect(drawer.locator("h2").first).to_have_text(replica.name)
    expect(drawer.locator("[data-log-state]")).to_have_text("waiting for lines")
    assert f"replica={replica.pk}" in page.url
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    expect(page.locator(f"{FIRST_MAP} [data-cells]")).to_be_focused()
    page.goto(f"{site.url}/?replica={replica.pk}")
    expect(drawer.locator("h2").first).to_have_text(replica.name)
    assert complaints == []


def test_a_server_that_goes_away_is_said_and_comes_back_by_itself(
    page: Page, site: Site, fleet: PaperFleet
) -> None:
    open_live(page, site, fleet)
    site.stop()
    banner = page.locator("[data-banner]")
    expect(banner).to_be_visible()
    expect(banner).to_contain_text("Reconnecting")
    expect(page.locator("[data-live]")).to_have_text("reconnecting")
    site.start()
    page.evaluate("window.dispatchEvent(new Event('online'))")  # what the machine says when it is back
    wait_until_live(page, fleet)
    expect(banner).to_be_hidden()


def test_a_controller_that_stands_still_turns_the_indicator_red(
    page: Page, site: Site, fleet: PaperFleet
) -> None:
    open_live(page, site, fleet)
    assert page.evaluate(LEVEL_AT_AGE, 2) == "good"
    assert page.evaluate(LEVEL_AT_AGE, 5) == "warn"
    expect(page.locator("[data-live]")).to_have_attribute("data-level", "bad")
    expect(page.locator("[data-banner]")).to_contain_text("the controllers stand still")


def test_back_off_is_spread_and_honours_what_the_server_asked_for(page: Page, site: Site) -> None:
    page.goto(site.url)
    waits = page.evaluate(
        """async () => {
          const { backoff } = await import("/static/js/live.js");
          const many = (attempt, code) => Array.from({ length: 400 }, () => backoff(attempt, code));
          return { first: many(0, 1006), late: many(20, 1006), restart: many(0, 1012), busy: many(0, 1013) };
        }"""
    )
    assert max(waits["first"]) <= 1000
    assert max(waits["late"]) <= 30_000
    assert max(waits["restart"]) - min(waits["restart"]) > 10_000, "all tabs would return at once"
    assert min(waits["busy"]) >= 10_000


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_scrolls_sideways_on_a_phone(
    page: Page, site: Site, fleet: PaperFleet, complaints: Complaints, theme: str
) -> None:
    node = make_node("a-node-with-quite-a-long-name-for-a-phone", accelerators=12)
    cards = [str(uuid) for uuid in node.accelerators.values_list("uuid", flat=True)]
    links = msgspec.to_builtins(make_topology(cards))
    NodeHardware.objects.create(node=node, topology=links, probe_notes=["no tool told of its fans"])
    deployment = make_deployment("a-deployment-with-a-long-name")
    create_replicas(deployment.pk, 3, why="no nodes have joined", actor="test", now=NOW)
    make_model("another-model-with-a-long-name")
    fleet.publish()
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]  # one of the two literals
    paths = [
        "/",
        "/nodes",
        f"/nodes/{node.pk}",
        "/deployments",
        f"/deployments/{deployment.pk}",
        "/replicas",
        "/models",
    ]
    for path in [*paths, "/sessions", "/events", "/keys", "/deployments/new", "/search?q=a"]:
        page.goto(site.url + path)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, f"{path} is {width} px wide"
    assert complaints == []


def test_the_slash_key_finds_a_node(page: Page, site: Site, fleet: PaperFleet) -> None:
    node = make_node("gpu-7")
    fleet.publish()
    page.goto(site.url)
    page.keyboard.press("/")
    page.keyboard.type("gpu")
    link = page.locator("[data-search-results] a")
    expect(link).to_have_text("gpu-7")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/nodes/{node.pk}")
