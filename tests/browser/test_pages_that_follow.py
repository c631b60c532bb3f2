"""Pages that follow what happens, and lists that are searched while somebody types, in Chromium."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from exaserve_ops.inventory.services import cordon_node
from exaserve_ops.serving.domain.observed import ObservedExit, ObservedReplica
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.observations import record_observations
from exaserve_ops.serving.services.replicas import advance_replica, create_replicas
from tests.browser.conftest import Complaints, Site, open_live
from tests.fakes.gang_records import make_gang_of_two
from tests.fakes.live_fleet import PaperFleet
from tests.fakes.world import NOW, make_deployment, make_node

pytestmark = pytest.mark.browser

COUNT_RENEWALS = """() => {
  window.renewals = 0;
  document.addEventListener("renewed", () => { window.renewals += 1; });
}"""


def test_a_deployments_page_shows_replicas_that_are_made_meanwhile(
    page: Page, site: Site, fleet: PaperFleet, complaints: Complaints
) -> None:
    deployment = make_deployment()
    open_live(page, site, fleet, f"/deployments/{deployment.pk}")
    expect(page.locator("#listing")).to_contain_text("No replica exists")
    made = create_replicas(deployment.pk, 2, why="2 of 2", actor="test", now=NOW)
    expect(page.locator("#listing tbody tr")).to_have_count(2)
    expect(page.locator("#listing")).to_contain_text(made[1].name)
    assert complaints == []


def test_a_replicas_badge_facts_and_history_follow_it(
    page: Page, site: Site, fleet: PaperFleet, complaints: Complaints
) -> None:
    [made] = create_replicas(make_deployment().pk, 1, why="1 of 1", actor="test", now=NOW)
    open_live(page, site, fleet, f"/replicas/{made.pk}")
    expect(page.locator("#replica-badge")).to_contain_text("pending")
    node = make_node("gpu-7")
    Replica.objects.filter(pk=made.pk).update(node=node, attempt=3)
    advance_replica(made.pk, "place", reason="there is room", actor="test", now=NOW)
    expect(page.locator("#replica-badge")).to_contain_text("placed")
    expect(page.locator("#replica-history")).to_contain_text("there is room")
    expect(page.locator("#replica-facts")).to_contain_text("gpu-7")
    expect(page.locator("#replica-facts dt:has-text('Attempt') + dd")).to_have_text("3")
    assert complaints == []


def test_the_end_of_each_member_of_a_replica_comes_onto_its_page(
    page: Page, site: Site, fleet: PaperFleet, complaints: Complaints
) -> None:
    made = make_gang_of_two()
    open_live(page, site, fleet, f"/replicas/{made.pk}")
    expect(page.locator("#log nav a[aria-current]")).to_have_text("Member 0 on wide-0")
    ending = page.locator("#replica-exit")
    expect(ending).to_be_empty()
    head = made.members.get(number=0)
    ended = ObservedExit(1, 3, None, 2.0, ("no such file", "bye"))
    seen = ObservedReplica(
        str(made.pk), made.generation, "failed", 1, last_exit=ended, member_number=0, epoch=1
    )
    record_observations([seen], node_id=head.node_id, actor="agent", now=NOW)
    expect(ending).to_contain_text("Attempt 1 exited with code 3 after 2.0 s")
    expect(ending).to_contain_text("no such file")
    page.locator("#log nav a", has_text="Member 1 on wide-1").click()
    expect(page.locator("#log nav a[aria-current]")).to_have_text("Member 1 on wide-1")
    expect(ending).to_contain_text("was killed by signal 9")
    assert complaints == []


def test_what_somebody_is_busy_with_is_left_alone_while_the_rest_follows(
    page: Page, site: Site, fleet: PaperFleet
) -> None:
    node = make_node("gpu-7")
    open_live(page, site, fleet, f"/nodes/{node.pk}")
    page.evaluate(COUNT_RENEWALS)
    page.locator("summary", has_text="Drain").click()
    why = page.locator("details[open] [name=reason]")
    why.fill("its fans")
    cordon_node(node.pk, reason="by somebody else", actor="user:olga", now=NOW)
    expect(page.locator("#node-state")).to_contain_text("cordoned")
    expect(page.locator("#node-notices")).to_contain_text("by somebody else")
    page.wait_for_function("() => window.renewals > 0")
    expect(why).to_be_visible()
    expect(why).to_have_value("its fans")
    expect(page.locator("#node-actions")).to_contain_text("Cordon…")


def test_a_search_goes_on_while_its_first_letters_are_looked_for(
    page: Page, site: Site, fleet: PaperFleet, complaints: Complaints
) -> None:
    for name in ("gpu-1", "gpu-2", "cpu-1"):
        make_node(name)
    open_live(page, site, fleet, "/nodes")
    field = page.locator(".filters [name=q]")
    field.click()
    page.keyboard.type("gp")
    page.wait_for_url("**q=gp&**")
    expect(page.locator("#listing tbody tr")).to_have_count(2)
    page.keyboard.type("u-2")
    page.wait_for_url("**q=gpu-2&**")
    expect(page.locator("#listing tbody tr")).to_have_count(1)
    expect(field).to_be_focused()
    expect(field).to_have_value("gpu-2")
    page.locator("#show-all a").click()
    expect(page.locator("#listing tbody tr")).to_have_count(3)
    assert complaints == []
