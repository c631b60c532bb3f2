"""The rows of a node's machine in Chromium: one crosshair for all, and they fit a phone."""

from __future__ import annotations

import re

import msgspec
import pytest
from playwright.sync_api import Page, expect

from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.telemetry.domain.pictures import NodeReport
from tests.browser.conftest import Complaints, Site
from tests.fakes.live_fleet import PaperFleet
from tests.fakes.machine_minutes import CARDS, record_machine
from tests.fakes.world import make_node
from tests.protocol import samples

pytestmark = pytest.mark.browser

ROWS = ".timeline:not(.timeline-axis)"
CROSSES = f"{ROWS} .cross[visibility=visible]"
TITLES = [
    "TTFT", "Requests", "Cards in use", "Their memory", "PCIe", "NVLink", "Power", "Temperature", "Held back",
    "Network", "Disks", "Processor", "Memory",
]  # fmt: skip


@pytest.fixture
def node(site: Site, fleet: PaperFleet) -> Node:
    assert site.url
    node = make_node("gpu-1", accelerators=CARDS)
    node.accelerators.update(kind="cuda")
    record_machine(node.pk, until=clock.now(), minutes=59, gap=range(20, 26))
    beat = samples.REPORTS["heartbeat"]
    load = beat.accelerator_loads[0]
    loads = [
        msgspec.structs.replace(
            load,
            uuid=f"GPU-{n}",
            ordinal=n,
            nvlinks_up=18,
            nvlink_both_bytes_per_second=None,
            held_back_by=(),
            ecc_uncorrected=0,
            last_xid=0,
            nvlink_errors=0,
            pcie_replays=0,
            notes=(),
        )
        for n in range(CARDS - 1)
    ]
    beat = msgspec.structs.replace(
        beat,
        replicas=(),
        kv_pools=(),
        weights=None,
        unknown_processes=(),
        accelerator_loads=(*loads, msgspec.structs.replace(load, ordinal=CARDS - 1)),
    )
    fleet.reports[str(node.pk)] = NodeReport(clock.unix_seconds(), 1, msgspec.msgpack.encode(beat))
    fleet.publish()
    return node


def test_rows_share_one_crosshair_and_say_what_stands_there(
    page: Page, site: Site, node: Node, complaints: Complaints
) -> None:
    page.goto(f"{site.url}/nodes/{node.pk}")
    rows = page.locator(ROWS)
    expect(rows).to_have_count(len(TITLES))
    assert [text.strip() for text in rows.locator(".timeline-name").all_text_contents()] == TITLES
    use = rows.nth(TITLES.index("Cards in use"))
    expect(use.locator("path.trace")).to_have_count(CARDS)
    expect(use.locator(".timeline-value")).to_contain_text(f"card {CARDS - 1}")
    expect(page.locator(CROSSES)).to_have_count(0)
    page.locator("[data-timelines]").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(CROSSES)).to_have_count(len(TITLES))
    expect(page.locator(".timeline-axis .timeline-value")).to_have_text(re.compile(r"\d\d:\d\d"))
    places = page.locator(CROSSES).evaluate_all("lines => lines.map((line) => line.getAttribute('x1'))")
    assert len(set(places)) == 1
    plot = rows.nth(4).locator("svg")
    plot.scroll_into_view_if_needed()
    plot.hover(position={"x": 300, "y": 10})
    expect(page.locator(CROSSES).first).not_to_have_attribute("x1", places[0])
    assert complaints == []


def test_rows_fit_a_phone_and_a_missing_time_is_a_gap(
    page: Page, site: Site, node: Node, complaints: Complaints
) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{site.url}/nodes/{node.pk}?range=6h")
    expect(page.locator(ROWS)).to_have_count(len(TITLES))
    expect(page.locator(".ranges [aria-current]")).to_have_text("6 h")
    trace = page.locator(ROWS).first.locator("path.trace").first.get_attribute("d") or ""
    assert trace.count("M") == len(("before the gap", "after it"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert complaints == []
