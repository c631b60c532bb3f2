"""Pages of replicas: the table with its loads, the chart, replace and restart."""

from __future__ import annotations

from datetime import timedelta

from django.test import Client
from django.urls import reverse

from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import advance_replica, create_replicas
from exaserve_ops.telemetry.models import ReplicaMinute
from tests.dashboard.conftest import MemoryReader, World, addresses
from tests.fakes.world import NOW


def test_replacing_a_replica_twice_says_what_happened_instead_of_failing(
    operator: Client, world: World
) -> None:
    address = addresses(world)["replica_replace"]
    operator.post(address, {"reason": "slow"})
    assert Replica.objects.get(pk=world["replica_id"]).wanted == "stop"
    page = operator.post(address, {"reason": "slow"}, follow=True)
    assert "Not done" in page.content.decode()


def test_restarting_a_failed_replica_raises_its_generation(operator: Client, world: World) -> None:
    replica = Replica.objects.get(pk=world["replica_id"])
    replica.node = Node.objects.get()
    replica.save()
    advance_replica(replica.pk, "place", reason="", actor="test", now=NOW)
    advance_replica(replica.pk, "seen_failed", reason="5 attempts ended", actor="test", now=NOW)
    operator.post(addresses(world)["replica_restart"], {"reason": "driver fixed"})
    assert Replica.objects.get(pk=replica.pk).generation == replica.generation + 1


def test_filters_and_pages_live_in_the_address(operator: Client, world: World) -> None:
    create_replicas(world["deployment_id"], 60, why="more", actor="test", now=NOW)
    first = operator.get(reverse("replicas"), {"state": "pending"}).content.decode()
    assert "?state=pending&amp;page=2" in first
    second = operator.get(reverse("replicas"), {"state": "pending", "page": 2}).content.decode()
    assert "51\u201361 of 61" in second
    assert "Nothing matches" in operator.get(reverse("replicas"), {"state": "nonsense"}).content.decode()


def test_loads_stand_in_the_table_and_are_renewed_never_as_zero(
    operator: Client, world: World, reader: MemoryReader
) -> None:
    node = Node.objects.get()
    Replica.objects.filter(pk=world["replica_id"]).update(node=node)
    page = operator.get(reverse("replicas")).content.decode()
    assert page.count("no data") == 4
    load = {"kv_used_ratio": 0.37, "requests_running": 3, "requests_waiting": 0, "ttft_p95_seconds": None}
    telemetry = {
        "received_at": clock.unix_seconds(),
        "replicas": {str(world["replica_id"]): {"state": "ready", "load": load}},
    }
    reader.nodes[str(node.pk)] = telemetry
    page = operator.get(reverse("replicas")).content.decode()
    assert "37\u202f%" in page
    assert page.count("no data") == 1, "its engine does not say its TTFT"
    row = operator.get(addresses(world)["replica_row"]).content.decode()
    assert "37\u202f%" in row
    asked = {"ids": f"{world['replica_id']},nonsense"}
    assert operator.get(reverse("replica_loads"), asked).json() == {
        str(world["replica_id"]): {
            "kv": "37\u202f%",
            "ttft": "\u2013",
            "running": "3",
            "waiting": "0",
            "tokens": "\u2013",
        }
    }
    telemetry["received_at"] -= 60
    assert "37\u202f%" not in operator.get(reverse("replicas")).content.decode()


def test_the_chart_of_a_replica_has_gaps_where_nothing_was_recorded(operator: Client, world: World) -> None:
    address = addresses(world)["replica_figure"]
    assert operator.get(address).json()["data"] == []
    minute = clock.now().replace(second=0, microsecond=0) - timedelta(minutes=5)
    for back in (0, 2):
        ReplicaMinute.objects.create(
            replica_id=world["replica_id"], minute=minute - timedelta(minutes=back), kv_used_ratio_max=0.5
        )
    lines = operator.get(address).json()["data"]
    assert len(lines) == 6
    known = [value for value in lines[0]["y"] if value is not None]
    assert known == [0.5, 0.5]
    at = lines[0]["y"].index(0.5)
    assert lines[0]["y"][at : at + 3] == [0.5, None, 0.5]
    assert not any(lines[1]["y"]), "an engine that said nothing has no line, not one at zero"


def test_launch_that_waits_for_memory_says_its_figures_on_the_page_and_in_rest(
    operator: Client, world: World
) -> None:
    wait = {
        "place": "GPU-1",
        "needed_bytes": 60 << 30,
        "free_bytes": 12 << 30,
        "total_bytes": 80 << 30,
        "at_most_seconds": 300.0,
        "holders": [{"kind": "unnamed", "pid": 0, "replica_id": "", "command": "", "memory_bytes": 68 << 30}],
    }
    rows = Replica.objects.filter(pk=world["replica_id"])
    rows.update(memory_wait=wait, memory_since=NOW, reason="waiting for memory of GPU-1")
    page = operator.get(reverse("replica", args=[world["replica_id"]])).content.decode()
    assert "it needs 60\u202fGiB, and 12\u202fGiB of 80\u202fGiB are free" in page
    assert "launched all the same after" in page
    assert "waits for memory</span>" in operator.get(reverse("replicas")).content.decode()
    answer = operator.get(f"/api/v1/replicas/{world['replica_id']}").json()
    assert answer["memory_wait"] == wait
    rows.update(memory_wait=wait | {"at_most_seconds": None})
    page = operator.get(reverse("replica", args=[world["replica_id"]])).content.decode()
    assert "replaced elsewhere after a minute" in page
