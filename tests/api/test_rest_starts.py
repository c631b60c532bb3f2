"""Starts over REST: how they go, how they went, and the limits."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from exaserve_ops.audit.models import Event
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.starts import StartLimits
from exaserve_ops.serving.models import Deployment, Replica, StagedStart
from exaserve_ops.serving.selectors.starts import start_limits
from tests.fakes.staged_start import make_staged_start
from tests.fakes.world import JsonClient, make_deployment

pytestmark = pytest.mark.django_db
NOW = "/api/v1/starts/now"


def test_quiet_fleet_has_nobody_waiting_and_tells_its_limits(operator: JsonClient) -> None:
    told = operator.get(NOW).json()
    assert (told["starting"], told["waiting"], told["since"], told["waves"]) == (0, 0, None, [])
    assert told["limits"]["per_node"] == StartLimits().per_node


def test_staged_start_tells_waves_causes_and_a_pace_once_it_is_measured(operator: JsonClient) -> None:
    deployment = make_staged_start(ready=6, starting=2, waiting=4)
    told = operator.get(NOW).json()
    assert (told["starting"], told["waiting"], told["ready"]) == (2, 4, 6)
    assert [(wave["let_go"], wave["ready"]) for wave in told["waves"]] == [(6, 6), (2, 0)]
    assert told["causes"] == [
        {
            "words": "others on their node to start",
            "replicas": 4,
            "example": "waits its turn: 2 of 2 start on gpu-1",
        }
    ]
    assert told["ready_per_second"] == pytest.approx(0.1, rel=0.2)
    assert told["eta_seconds"] == pytest.approx(60, rel=0.2)
    of_it = operator.get(NOW, {"deployment": str(deployment.pk)}).json()
    assert of_it["waiting"] == 4
    other = operator.get(NOW, {"deployment": str(make_deployment("apart").pk)}).json()
    assert (other["waiting"], other["since"]) == (0, None), "it has no part in it"
    unknown = operator.get(NOW, {"deployment": "00000000-0000-4000-8000-000000000000"})
    assert unknown.status_code == 400


def test_no_time_is_told_before_enough_became_ready(operator: JsonClient) -> None:
    make_staged_start(ready=4, starting=2, waiting=4)
    told = operator.get(NOW).json()
    assert (told["ready_per_second"], told["eta_seconds"]) == (None, None)


def test_history_lists_the_latest_first_and_open_ones_alone_if_asked(operator: JsonClient) -> None:
    make_staged_start(ready=0, starting=1, waiting=1)
    long_ago = clock.now() - timedelta(days=1)
    StagedStart.objects.create(began_at=long_ago, ended_at=long_ago, replicas=7, waves=2, most_waiting=5)
    rows = operator.get("/api/v1/starts").json()["results"]
    assert [row["replicas"] for row in rows] == [0, 7]
    [row] = operator.get("/api/v1/starts", {"open": "false"}).json()["results"]
    assert (row["replicas"], row["waves"], row["most_waiting"]) == (7, 2, 5)
    assert operator.get(f"/api/v1/starts/{row['id']}").json() == row


def test_limits_are_set_with_a_reason_and_what_is_left_out_stays(operator: JsonClient) -> None:
    answer = operator.post("/api/v1/starts/limits", {"per_node": 2, "reason": "slow disks"})
    assert answer.status_code == 200
    assert answer.json()["per_node"] == 2
    assert start_limits() == StartLimits(per_node=2)
    event = Event.objects.get(subject_kind="start_rules")
    assert event.reason == "per node 4 → 2: slow disks"


@pytest.mark.parametrize(
    "body",
    [{"per_node": -1, "reason": "x"}, {"per_node": 2}, {"per_nodes": 2, "reason": "x"}, {"per_node": "many"}],
)
def test_limits_that_make_no_sense_are_refused_and_nothing_changes(
    operator: JsonClient, body: dict[str, Any]
) -> None:
    assert operator.post("/api/v1/starts/limits", body).status_code == 400
    assert start_limits() == StartLimits()


def test_parameters_that_do_not_exist_are_named(
    operator: JsonClient, as_role: Callable[[str], JsonClient]
) -> None:
    assert operator.get(NOW, {"deployment": "chat"}).status_code == 400
    assert operator.get(NOW, {"node": "x"}).status_code == 400
    assert as_role("").get(NOW).status_code == 403
    assert Deployment.objects.count() == Replica.objects.count() == 0


def test_limits_set_in_the_admin_go_through_the_service_and_are_one_row() -> None:
    client = Client()
    client.force_login(User.objects.create_superuser("root", password="a long enough password"))
    wish = {"per_node": 2, "per_fleet": 100, "from_origins": 4, "in_place": 8, "per_rack": 16}
    assert client.post("/admin/serving/startrules/add/", wish).status_code == 302
    assert start_limits() == StartLimits(**wish)
    assert client.get("/admin/serving/startrules/add/").status_code == 403
    assert client.post("/admin/serving/startrules/1/change/", wish | {"per_node": 3}).status_code == 302
    assert start_limits().per_node == 3
    reasons = Event.objects.filter(subject_kind="start_rules").order_by("pk").values_list("reason", flat=True)
    assert list(reasons)[-1] == "per node 2 → 3: set in the admin"
    assert client.post("/admin/serving/startrules/1/delete/", {"post": "yes"}).status_code == 403
