"""Pages say how many start, how many wait and why; limits are set with a reason by those who may."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.test import Client
from django.urls import reverse
from pytest_django import DjangoAssertNumQueries

from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard.starts import BARS_HEIGHT, MOST_BARS, bars_of
from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.domain.starts import StartLimits
from exaserve_ops.serving.models import StagedStart
from exaserve_ops.serving.selectors.start_outlook import StartWave
from exaserve_ops.serving.selectors.starts import start_limits
from tests.dashboard.conftest import World
from tests.fakes.staged_start import make_staged_start
from tests.fakes.world import make_deployment

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LIMITS = {"per_node": 2, "per_fleet": 64, "from_origins": 4, "per_rack": 8, "in_place": 16}
WISH = {**LIMITS, "reason": "old disks"}


def text(client: Client, name: str, *args: object) -> str:
    return client.get(reverse(name, args=args)).content.decode()


def test_fleet_and_deployment_say_nothing_of_starts_while_nobody_waits(viewer: Client, world: World) -> None:
    assert "Wait for their turn" not in text(viewer, "fleet")
    assert "Wait for their turn" not in text(viewer, "deployment", world["deployment_id"])
    assert text(viewer, "starts_now").strip() == ""


def test_fleet_and_deployment_say_who_starts_who_waits_and_why(viewer: Client) -> None:
    staged = make_staged_start(ready=6, starting=2, waiting=4)
    for page in (text(viewer, "fleet"), text(viewer, "deployment", staged.pk), text(viewer, "starts")):
        assert "others on their node to start" in page
        assert "such as: waits its turn: 2 of 2 start on gpu-1" in page
        assert page.count('class="start-wave"') == 2
        assert "at the pace of the last minute" in page
    other = make_deployment("calm", replicas=0)
    assert "Wait for their turn" not in text(viewer, "deployment", other.pk)


def test_replicas_on_simulated_nodes_are_marked_and_the_page_of_starts_does_not_lead_to_itself(
    viewer: Client,
) -> None:
    make_staged_start(ready=6, starting=2, waiting=4)
    assert "6 simulated" not in text(viewer, "starts")
    Node.objects.update(simulated=True)
    assert "6 simulated" in text(viewer, "starts")
    assert "limits and history" in text(viewer, "starts_now")
    assert "limits and history" not in text(viewer, "starts")
    again = viewer.get(reverse("starts_now"), {"at_home": "yes"}).content.decode()
    assert "limits and history" not in again


def test_time_that_is_left_is_told_only_once_it_is_measured(viewer: Client) -> None:
    make_staged_start(ready=4, starting=2, waiting=4)
    page = text(viewer, "starts_now")
    assert "not measured yet" in page
    assert "too few yet to tell a pace" in page


def test_plan_of_a_deployment_says_whose_turn_it_is_not(viewer: Client) -> None:
    staged = make_staged_start(ready=1, starting=2, waiting=1)
    page = text(viewer, "deployment_plan", staged.pk)
    assert "waits its turn: 2 of 2 start on gpu-1" in page
    assert "its agent launches it: waits" not in page


def test_limits_are_set_by_operators_with_a_reason_that_stands_on_the_page(
    operator: Client, viewer: Client
) -> None:
    assert viewer.post(reverse("start_limits_set"), WISH).status_code == 403
    assert start_limits() == StartLimits()
    answer = operator.post(reverse("start_limits_set"), WISH, follow=True)
    assert "The limits are set" in answer.content.decode()
    assert start_limits() == StartLimits(**LIMITS)
    assert "old disks" in Event.objects.get(subject_kind="start_rules").reason
    assert "per node 4 → 2" in text(viewer, "starts")
    assert 'name="per_node"' not in text(viewer, "starts")


@pytest.mark.parametrize("change", [{"per_node": "-1"}, {"per_node": ""}, {"reason": ""}, {"per_rack": "x"}])
def test_limits_that_make_no_sense_are_named_and_nothing_changes(
    operator: Client, change: dict[str, str]
) -> None:
    answer = operator.post(reverse("start_limits_set"), WISH | change)
    assert answer.status_code == 422
    assert 'role="alert"' in answer.content.decode()
    assert start_limits() == StartLimits()
    assert 'value="64"' in answer.content.decode(), "what was given is still there"


def test_staged_starts_before_are_listed(viewer: Client) -> None:
    assert "None is over yet" in text(viewer, "starts")
    StagedStart.objects.create(
        began_at=NOW, ended_at=NOW + timedelta(seconds=90), replicas=3072, waves=41, most_waiting=2048
    )
    page = text(viewer, "starts")
    assert "2,048" in page.replace("\u202f", ",").replace("\u2009", ",")


def test_panel_costs_the_same_however_many_start(
    viewer: Client, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    make_staged_start(ready=20, starting=8, waiting=40)
    with django_assert_max_num_queries(12):
        text(viewer, "starts_now")


def test_many_waves_are_drawn_as_few_bars_that_lose_none() -> None:
    waves = [StartWave(NOW + timedelta(seconds=n), 1 + n % 7, n % 2) for n in range(333)]
    bars = bars_of(waves)
    assert len(bars) <= MOST_BARS
    assert sum(bar.let_go for bar in bars) == sum(wave.let_go for wave in waves)
    assert sum(bar.waves for bar in bars) == 333
    assert all(0 < bar.height <= BARS_HEIGHT and bar.ready_height <= bar.height for bar in bars)
    assert max(bar.height for bar in bars) == BARS_HEIGHT
    assert bars_of(()) == ()


def test_a_bar_says_the_same_in_words() -> None:
    [one] = bars_of([StartWave(NOW, 1024, 1000)])
    assert one.words == "wave of 00:00:00 UTC: 1,024 let go, 1,000 ready"
    assert (one.ready_top, one.top) == (BARS_HEIGHT - one.ready_height, 0)
