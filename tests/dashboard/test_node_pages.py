"""Pages of nodes: cordon, join."""

from __future__ import annotations

import re
from datetime import timedelta

import msgspec
from django.test import Client
from django.urls import reverse

from exaserve_ops.adapters.reports import describe_heartbeat
from exaserve_ops.dashboard.machine import machine_rows
from exaserve_ops.inventory.models import JoinToken, Node
from exaserve_ops.lib import clock
from exaserve_ops.telemetry.domain.node_history import draw_history
from exaserve_ops.telemetry.models import NodeMinute
from tests.dashboard.conftest import MemoryReader, World, addresses
from tests.fakes.machine_minutes import record_machine
from tests.fakes.world import NOW
from tests.protocol import samples

MINUTE = timedelta(minutes=1)


def test_cordoning_needs_a_reason_which_everybody_sees(operator: Client, world: World) -> None:
    address = addresses(world)["node_cordon"]
    operator.post(address, {"reason": "  "})
    assert not Node.objects.get().cordoned
    operator.post(address, {"reason": "kernel update"})
    assert Node.objects.get().cordoned
    assert "kernel update" in operator.get(addresses(world)["node"]).content.decode()
    operator.post(addresses(world)["node_uncordon"])
    assert not Node.objects.get().cordoned


def test_adding_a_node_shows_the_command_with_its_token_once(operator: Client) -> None:
    page = operator.post(reverse("node_join"))
    assert re.search(r"EXAOPS_JOIN_TOKEN=xj-[\w-]{40,}", page.content.decode())
    assert "python -m workers.agent join --url" in page.content.decode()
    assert JoinToken.objects.count() == 1


def test_host_shows_each_interface_its_disks_and_what_its_tasks_wait_for(
    operator: Client, world: World, reader: MemoryReader
) -> None:
    host = {
        "cpu_stalled_ratio": 0.25,
        "memory_stalled_ratio": 0.0,
        "disk_read_bytes_per_second": 2048.0,
        "interfaces": {"ib0": {"receive_bytes_per_second": 1 << 20, "send_bytes_per_second": 0.0}},
    }
    reader.nodes[str(Node.objects.get().pk)] = {"received_at": clock.unix_seconds(), "host": host}
    page = operator.get(reverse("node_host", args=[Node.objects.get().pk])).content.decode()
    page = page.replace("\u202f", " ")
    assert "in 1 MiB/s, out 0 B/s" in page
    assert "2 KiB<small>/s</small>" in page
    assert "memory 0 %, disks \u2013" in page, "zero is told, the other is not"
    assert world


def test_links_show_their_speed_and_cards_what_is_wrong_with_them(
    operator: Client, world: World, reader: MemoryReader
) -> None:
    node = Node.objects.get()
    told = describe_heartbeat(msgspec.msgpack.encode(samples.REPORTS["heartbeat"]))
    told["accelerators"].append(told["accelerators"][0] | dict.fromkeys(told["accelerators"][0], None) | {
        "uuid": "GPU-2", "ordinal": 2, "sources": ["nvml"], "age_seconds": 42.0, "nvlinks": 0, "notes": [],
    })  # fmt: skip
    told["accelerators"][0]["held_back_by"] = ("power cap", "heat")
    reader.nodes[str(node.pk)] = {"received_at": clock.unix_seconds(), **told}
    page = operator.get(reverse("node_host", args=[node.pk])).content.decode().replace("\u202f", " ")
    assert "held back by power cap" not in page
    assert "of 11.6 GiB/s each way" in page
    assert "busiest core 75 %" in page
    for warning in (
        "held back by heat", "of 700, at its cap", "1 of 18 NVLinks are down",
        "memory errors that could not be corrected: 1",
        "errors on NVLink: 2", "Packets sent anew since the driver was loaded: 3", "XID 94",
        "power: GPU is lost",
    ):  # fmt: skip
        assert warning in page
    unknown = page[page.index("GPU-2") :]
    assert "<td>" in unknown
    assert "0 B/s" not in unknown, "what is not told is not zero"
    assert "not told" in unknown
    assert "nvml, 42 s ago" in unknown
    assert world


def test_rows_are_of_one_time_axis_and_say_once_what_nobody_tells(operator: Client, world: World) -> None:
    node = Node.objects.get()
    address = reverse("node_machine", args=[node.pk])
    assert operator.get(address).json()["rows"] == []
    record_machine(node.pk, until=clock.now(), minutes=30, card_pcie_ratio=None, network_used_ratio=None)
    body = operator.get(address).json()
    assert {len(line["values"]) for row in body["rows"] for line in row["lines"]} == {len(body["at"])}
    units = {row["title"]: (row["unit"], row["threshold"]) for row in body["rows"]}
    assert next(iter(units)) == "TTFT"
    assert units["PCIe"] == ("bytes_per_second", None), "its link's speed is not told"
    assert units["NVLink"] == ("ratio", 0.8)
    assert units["Processor"] == ("ratio", 0.7)
    assert "RDMA" not in units
    assert body["missing"] == ""
    assert operator.get(address, {"range": "24h"}).json()["step_seconds"] == 600.0
    assert operator.get(address, {"range": "for ever"}).json()["step_seconds"] == 60.0
    assert world


def test_node_without_links_says_so_once_and_quiet_rows_are_left_out() -> None:
    rows = [
        NodeMinute(minute=NOW, cpu_used_ratio=0.5, io_stalled_ratio=0.001, card_ordinals=[0],
                   card_used_ratio=[0.0], card_held_back_ratio=[0.0])
    ]  # fmt: skip
    history = draw_history(rows, since=NOW, until=NOW + MINUTE, step=MINUTE)
    body = machine_rows(history, has_cards=True, has_nvlink=False)
    assert [row["title"] for row in body["rows"]] == ["Cards in use", "Processor"]
    assert body["missing"] == (
        "No card here has NVLink. Nobody on this node told of PCIe, network, disks in this time."
    )
    assert "PCIe" not in machine_rows(history, has_cards=False, has_nvlink=None)["missing"]
