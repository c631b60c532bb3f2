"""A node's machine over REST: as it is now, and over time."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from exaserve_ops.adapters.reports import describe_heartbeat
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from tests.api.conftest import Telemetry
from tests.fakes.machine_minutes import record_machine
from tests.fakes.world import JsonClient
from tests.protocol import samples

pytestmark = pytest.mark.django_db

UNTIL = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def address(node: Node, what: str) -> str:
    return f"/api/v1/nodes/{node.pk}/{what}"


def test_machine_is_told_as_its_agent_reported_it(
    viewer: JsonClient, node: Node, telemetry: Telemetry
) -> None:
    beat = samples.REPORTS["heartbeat"]
    told = describe_heartbeat(msgspec.msgpack.encode(beat))
    telemetry.nodes[str(node.pk)] = {"received_at": 9.0, **told}
    body = viewer.get(address(node, "machine")).json()
    assert (body["received_at"], body["simulated"]) == (9.0, False)
    assert body["host"]["cpu_busiest_ratio"] == 0.75
    assert body["host"]["interfaces"]["eth0"]["link_bytes_per_second"] == 12.5e9
    assert body["host"]["rdma"]["mlx5_0/1"]["send_bytes_per_second"] == 9.0
    assert body["accelerators"] == [json.loads(json.dumps(msgspec.structs.asdict(beat.accelerator_loads[0])))]


def test_node_that_never_reported_has_no_machine(viewer: JsonClient, node: Node) -> None:
    assert viewer.get(address(node, "machine")).json() == {
        "received_at": None, "simulated": False, "host": None, "accelerators": [],
    }  # fmt: skip


def test_history_has_a_line_for_each_measure_and_card_over_the_same_moments(
    viewer: JsonClient, node: Node
) -> None:
    record_machine(node.pk, until=UNTIL, minutes=10, gap=range(4, 6), cards=2, card_nvlink_ratio=None)
    since = UNTIL - timedelta(minutes=10)
    asked = {"since": since.isoformat(), "until": UNTIL.isoformat()}
    body = viewer.get(address(node, "history"), asked).json()
    assert (body["step_minutes"], len(body["at"]), body["at"][0]) == (1, 10, "2026-03-01T11:50:00Z")
    lines = {(line["name"], line["accelerator"]): line for line in body["lines"]}
    cpu = lines["cpu_busiest_ratio", None]
    assert (cpu["unit"], cpu["kind"]) == ("ratio", "mean")
    assert [value is None for value in cpu["values"]] == [False] * 4 + [True] * 2 + [False] * 4
    assert {card for name, card in lines if name == "card_pcie_ratio"} == {0, 1}
    assert not any(name in {"card_nvlink_ratio", "rdma_used_ratio"} for name, _ in lines)
    body = viewer.get(address(node, "history"), asked | {"step_minutes": 5}).json()
    waiting = next(line for line in body["lines"] if line["name"] == "requests_waiting")
    assert (len(body["at"]), waiting["kind"], len(waiting["values"])) == (2, "most", 2)


def test_history_is_of_the_last_hour_unless_asked_otherwise(viewer: JsonClient, node: Node) -> None:
    record_machine(node.pk, until=clock.now(), minutes=90)
    body = viewer.get(address(node, "history")).json()
    assert 60 <= len(body["at"]) <= 61
    assert body["lines"]


@pytest.mark.parametrize(
    ("asked", "field", "told"),
    [
        ({"since": "2026-03-01T00:00:00Z", "until": "2026-03-03T00:00:00Z"}, "since", "ask for longer steps"),
        ({"since": "2026-03-03T00:00:00Z", "until": "2026-03-01T00:00:00Z"}, "since", "after `until`"),
        ({"since": "yesterday"}, "since", "format"),
        ({"until": "0001-01-01T00:00:00Z"}, "until", "no hour before"),
        ({"step_minutes": "0"}, "step_minutes", "greater than"),
        ({"steps": "1"}, "steps", "There are: since, step_minutes, until."),
    ],
)
def test_asking_for_what_cannot_be_says_what_can(
    viewer: JsonClient, node: Node, asked: dict[str, str], field: str, told: str
) -> None:
    answer = viewer.get(address(node, "history"), asked)
    assert answer.status_code == 400
    assert field in str(answer.json())
    assert told in str(answer.json())


def test_what_has_no_filters_offers_none(viewer: JsonClient, node: Node) -> None:
    for place in (address(node, "machine"), "/api/v1/relocations/plan"):
        for name in ("card", "page"):
            answer = viewer.get(place, {name: "1"})
            assert answer.status_code == 400
            assert "There is no such filter. There are none here." in str(answer.json())
