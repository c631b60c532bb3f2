"""The map of a node's KV pool in Chromium: it moves, answers pointer and keyboard, and fits a phone."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import create_replicas, place_replica
from exaserve_ops.telemetry.domain.pictures import NodeReport
from tests.browser.conftest import Complaints, Site
from tests.fakes.kv_pools import beat_with, load_of, pool_of
from tests.fakes.live_fleet import PaperFleet
from tests.fakes.world import NOW, make_deployment, make_node
from workers.protocol.kv_pools import DAMAGED_CELL, MapCell, pack_map

pytestmark = pytest.mark.browser

MAP = "[data-kv-map]"
SLOW = 30_000
"""Milliseconds for what takes a second where nothing else runs."""
FIRST = (MapCell(1, 1.0, 0.0, 1), MapCell(1, 0.25, 0.75, 3), MapCell(0), MapCell(DAMAGED_CELL))


class KvNode:
    """One node with one replica, whose reports a test writes."""

    def __init__(self, fleet: PaperFleet) -> None:
        self.node: Node = make_node("n1")
        [replica] = create_replicas(make_deployment().pk, 1, why="test", actor="test", now=NOW)
        uuid = self.node.accelerators.all()[0].uuid
        place = Placement(str(self.node.pk), self.node.name, (uuid,), "test")
        place_replica(replica.pk, place, actor="test", now=NOW)
        self.replica: Replica = replica
        self._fleet = fleet
        self._sequence = 0

    def report(self, *cells: MapCell) -> None:
        """Say what the pool looks like now."""
        self._sequence += 1
        key = str(self.replica.pk)
        beat = beat_with(pool_of(key, map=pack_map(cells)), loads={key: load_of()}, sequence=self._sequence)
        self._fleet.reports[str(self.node.pk)] = NodeReport(clock.unix_seconds(), self._sequence, beat)
        self._fleet.publish()

    def open(self, page: Page, site: Site) -> None:
        """Report, and open the node's page."""
        self.report(*FIRST)
        page.goto(f"{site.url}/nodes/{self.node.pk}")
        expect(page.locator(f"{MAP} svg g g")).to_have_count(len(FIRST), timeout=SLOW)


@pytest.fixture
def kv_node(site: Site, fleet: PaperFleet) -> KvNode:
    assert site.url
    return KvNode(fleet)


def letters(page: Page) -> list[str]:
    return page.locator(f"{MAP} svg g g text").all_text_contents()


def test_map_shows_owners_damage_and_what_is_free_and_moves_when_a_report_does(
    page: Page, site: Site, kv_node: KvNode, complaints: Complaints
) -> None:
    kv_node.open(page, site)
    assert letters(page) == ["A", "", "", "\u00d7"]
    kv_node.report(MapCell(0), MapCell(1, 0.0, 1.0, 5), MapCell(1, 1.0), MapCell(0))
    square = page.locator(f"{MAP} svg g g").nth(1)
    expect(square.locator("rect").first).to_have_class("kv-age5", timeout=SLOW)
    assert letters(page) == ["", "A", "", ""]
    assert complaints == []


def test_pointer_and_keyboard_learn_what_a_square_is(page: Page, site: Site, kv_node: KvNode) -> None:
    kv_node.open(page, site)
    tip = page.locator("[data-tip]")
    page.locator(f"{MAP} svg g g").nth(1).hover()
    expect(tip).to_contain_text(f"A · {kv_node.replica.name}", timeout=SLOW)
    expect(tip).to_contain_text("in cache", timeout=SLOW)
    expect(tip).to_contain_text("last used under 10 min ago", timeout=SLOW)
    page.locator(f"{MAP} svg g g").nth(3).hover()
    expect(tip).to_contain_text("Damaged", timeout=SLOW)
    page.locator(".kv-limits summary").focus()
    page.keyboard.press("Tab")
    expect(page.locator(MAP)).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("[data-kv-said]")).to_have_text(re.compile("^Free, extent 2"), timeout=SLOW)
    page.keyboard.press("End")
    expect(page.locator("[data-kv-said]")).to_have_text(re.compile("^Damaged"), timeout=SLOW)


def test_pool_of_another_size_is_drawn_anew_under_the_pointer(
    page: Page, site: Site, kv_node: KvNode, complaints: Complaints
) -> None:
    kv_node.open(page, site)
    page.locator(f"{MAP} svg g g").nth(3).hover()
    for count in (384, 1, 40):
        kv_node.report(*[MapCell(1, 1.0)] * count)
        expect(page.locator(f"{MAP} svg g g")).to_have_count(count, timeout=SLOW)
    kv_node.report()
    expect(page.locator(f"{MAP} svg g g")).to_have_count(0, timeout=SLOW)
    assert complaints == []


def test_phone_has_the_whole_map_and_the_table_without_scrolling_sideways(
    page: Page, site: Site, kv_node: KvNode
) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    kv_node.open(page, site)
    kv_node.report(*[MapCell(1, 1.0)] * 384)
    expect(page.locator(f"{MAP} svg g g")).to_have_count(384, timeout=SLOW)
    box = page.locator(f"{MAP} svg").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    assert box["height"] < 844
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    expect(page.locator("#kv")).to_contain_text("whole blocks of 16 tokens", timeout=SLOW)
    page.locator(f"{MAP} svg g g").first.click()
    expect(page.locator("[data-tip]")).to_be_visible()


def test_form_begins_with_the_limits_that_hold(page: Page, site: Site, kv_node: KvNode) -> None:
    kv_node.open(page, site)
    page.locator(".kv-limits summary").click()
    expect(page.locator("input[name=minimum_blocks]")).to_have_value("16")
    expect(page.locator("input[name=ceiling_blocks]")).to_have_value("64")
    page.locator("input[name=ceiling_blocks]").fill("48")
    page.locator("[data-kv-limits] input[name=reason]").fill("its neighbour is busy")
    page.locator("[data-kv-limits] button").click()
    expect(page.locator("#kv")).to_contain_text("is asked for other limits of KV blocks", timeout=SLOW)
    expect(page.locator("#kv")).to_contain_text(
        "at least 16 and at most 48 blocks: its neighbour is busy", timeout=SLOW
    )
