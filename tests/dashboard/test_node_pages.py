"""Pages of nodes: cordon, join."""

from __future__ import annotations

import re

from django.test import Client
from django.urls import reverse

from exaserve_ops.inventory.models import JoinToken, Node
from exaserve_ops.lib import clock
from tests.dashboard.conftest import MemoryReader, World, addresses


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
