"""Cards, slices, links and probe notes go from the vendor's tool to placement, page and REST."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from exaserve_ops.adapters.reports import _node_facts
from exaserve_ops.dashboard.hardware import hardware_of, link_words
from exaserve_ops.dashboard.ports import live_reader
from exaserve_ops.inventory.models import Accelerator, Node, NodeHardware
from exaserve_ops.inventory.services import record_hello
from exaserve_ops.serving.domain.placement import PlacementRequest, Refusal, choose_placement
from exaserve_ops.serving.domain.reservation import margin_bytes
from exaserve_ops.serving.selectors import node_rooms
from tests.dashboard.conftest import MemoryReader
from tests.fakes.world import GIB, NOW, client_with_key, make_deployment, make_node, make_user
from tests.probes import fake_tools
from tests.probes.fake_tools import sample
from workers.probes.accelerators import AcceleratorProbe, Survey
from workers.protocol import v1
from workers.simulation.hardware import make_accelerators, make_topology

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def reader() -> None:
    live_reader.use(MemoryReader())


def survey(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, **pages: str) -> Survey:
    """What an agent finds on a host whose nvidia-smi answers with the samples."""
    folder.mkdir(exist_ok=True)
    fake_tools.install_nvidia(folder, kind, **pages)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return AcceleratorProbe("n", environ={}).survey()


def hello(node: Node, found: Survey) -> v1.Hello:
    return v1.Hello(
        node_id=str(node.pk),
        boot_id="b1",
        major=v1.MAJOR,
        minor=v1.MINOR,
        agent_version="0.1",
        hostname=f"{node.name}.local",
        address="10.0.0.1",
        accelerators=found.accelerators,
        engines=("torch", "simulated"),
        labels={"rack": "r1"},
        topology=found.topology,
        probe_notes=found.notes,
        split_cards=found.split_cards,
    )


def take(node: Node, found: Survey) -> Node:
    return record_hello(node.pk, _node_facts(hello(node, found)), now=NOW)


def page_of(node: Node) -> str:
    browser = Client()
    browser.force_login(make_user("paul", "viewer"))
    return browser.get(reverse("node", args=[node.pk])).content.decode()


def test_card_in_mig_mode_takes_no_replica_but_its_slices_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = make_node("n1", accelerators=0)
    found = survey(monkeypatch, tmp_path / "tools", "mig")
    take(node, found)
    cards = Accelerator.objects.filter(node=node, split=True)
    assert {card.uuid for card in cards} == {card.uuid for card in found.split_cards}
    assert cards, "the sample has a card in MIG mode"
    slices = Accelerator.objects.filter(node=node, parent_uuid__in=cards)
    assert slices.count() >= 2
    rooms = node_rooms(make_deployment().pk, now=NOW)
    biggest_slice = max(part.memory_bytes - margin_bytes(part.memory_bytes) for part in slices)
    asked = PlacementRequest(engine="torch", memory_bytes=biggest_slice)
    whole = {a.uuid for a in Accelerator.objects.filter(node=node, split=False, parent_uuid="")}
    only_mig = tuple(
        dataclasses.replace(room, accelerators=tuple(a for a in room.accelerators if a.uuid not in whole))
        for room in rooms
    )
    placed = choose_placement(asked, only_mig)
    assert not isinstance(placed, Refusal)
    assert set(placed.accelerator_uuids) <= {part.uuid for part in slices}
    too_big = choose_placement(PlacementRequest(engine="torch", memory_bytes=biggest_slice + 1), only_mig)
    assert isinstance(too_big, Refusal), "the card has more memory than any slice, and is not offered"
    many = choose_placement(PlacementRequest("torch", GIB, accelerators=99), rooms)
    assert isinstance(many, Refusal)
    assert f"{cards[0].uuid} is in MIG mode" in many.summary()


def test_page_groups_slices_under_their_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node = make_node("n1", accelerators=0)
    take(node, survey(monkeypatch, tmp_path / "tools", "mig"))
    groups = hardware_of(Node.objects.get())["cards"]
    cut = [group for group in groups if group.slices]
    assert cut
    for group in cut:
        assert group.card.accelerator.split
        assert {row.accelerator.parent_uuid for row in group.slices} == {group.card.accelerator.uuid}
    text = page_of(node)
    assert "in MIG mode" in text
    assert cut[0].slices[0].accelerator.profile in text


def test_same_hello_again_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node = make_node("n1", accelerators=0)
    found = survey(monkeypatch, tmp_path / "tools", "h100x8")
    take(node, found)
    before = NodeHardware.objects.get().recorded_at
    with CaptureQueriesContext(
        connection,
    ) as queries:
        take(node, found)
    written = [
        q["sql"] for q in queries if q["sql"].lstrip().upper().startswith(("INSERT", "UPDATE", "DELETE"))
    ]
    assert written == []
    fewer = dataclasses.replace(found, notes=("nvidia-smi: it hangs",))
    take(node, fewer)
    hardware = NodeHardware.objects.get()
    assert hardware.probe_notes == ["nvidia-smi: it hangs"]
    assert hardware.recorded_at >= before


def test_what_could_not_be_read_is_unknown_with_its_reason_and_never_zero(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    query = sample("h100x8.q.xml").replace("<total>81559 MiB</total>", "<total>ERR!</total>", 1)
    assert query != sample("h100x8.q.xml")
    node = make_node("n1", accelerators=0)
    take(node, survey(monkeypatch, tmp_path / "tools", "h100x8", query=query))
    ill = Accelerator.objects.get(unreadable__contains=["memory_bytes"])
    shown = hardware_of(Node.objects.get())
    [row] = [group.card for group in shown["cards"] if group.card.accelerator == ill]
    assert not row.has_memory
    assert row.memory_unknown == "the vendor's tool said ERR!"
    assert any("could not read memory, because the tool said “ERR!”" in note for note in shown["notes"])
    text = page_of(node)
    assert "the vendor&#x27;s tool said ERR!" in text
    assert "0 B" not in text.partition('id="accelerators"')[2].partition('id="links"')[0]


def test_links_name_the_nearest_adapter_of_each_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node = make_node("n1", accelerators=0)
    found = survey(monkeypatch, tmp_path / "tools", "h100x8")
    take(node, found)
    links = hardware_of(Node.objects.get())["links"]
    assert len(links.rows) == 8
    for row in links.rows:
        assert row.nearest, f"{row.name} has adapters"
        kinds = {
            cell.kind
            for (_, adapter), cell in zip(links.columns, row.cells, strict=True)
            if adapter and cell.is_nearest
        }
        assert len(kinds) == 1, "as near as any"
    assert all(words == link_words(kind) and words for kind, words in links.legend)
    assert 'class="nearest"' in page_of(node)


def test_lost_lanes_are_a_warning_and_an_idle_link_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = make_node("n1", accelerators=0)
    found = survey(monkeypatch, tmp_path / "tools", "h100x8")
    take(node, found)
    Accelerator.objects.filter(ordinal=0).update(pcie_width_max=16, pcie_width_now=8)
    Accelerator.objects.filter(ordinal=1).update(
        pcie_width_max=16, pcie_width_now=16, pcie_generation_max=5, pcie_generation_now=1
    )
    cards = [group.card for group in hardware_of(Node.objects.get())["cards"]]
    assert cards[0].pcie.warning.startswith("8 of 16 lanes")
    assert cards[1].pcie.warning == ""
    assert "power" in cards[1].pcie.remark
    assert "degraded" in page_of(node)


def test_rest_gives_links_and_notes_of_one_node_and_keeps_lists_light(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = make_node("n1", accelerators=0)
    take(node, survey(monkeypatch, tmp_path / "tools", "mig"))
    bare = make_node("n2")
    reader = client_with_key(make_user("vera", "viewer"))
    told = reader.get(f"/api/v1/nodes/{node.pk}").json()
    assert {end["name"] for end in told["topology"]["endpoints"] if end["accelerator"]}
    part = next(a for a in told["accelerators"] if a["profile"])
    assert part["parent_uuid"] in {a["uuid"] for a in told["accelerators"] if a["split"]}
    unknown = reader.get(f"/api/v1/nodes/{bare.pk}").json()
    assert (unknown["topology"], unknown["probe_notes"]) == (None, [])
    assert "topology" not in reader.get("/api/v1/nodes").json()["results"][0]
    assert "tool on this node told how its parts are linked" in page_of(bare)


def test_simulated_node_has_hardware_to_look_at() -> None:
    node = make_node("n1", accelerators=0)
    tiles = make_accelerators(str(node.pk), 12, 64 * GIB)
    topology = make_topology([tile.uuid for tile in tiles])
    take(node, Survey(tiles, topology=topology))
    Node.objects.update(simulated=True)
    links = hardware_of(Node.objects.get())["links"]
    assert len(links.rows) == 12
    assert [cell.kind for cell in links.rows[0].cells[:3]] == ["", "NV4", "NODE"]
    assert all(len(row.nearest) == 1 for row in links.rows)
    assert "of a simulation" in page_of(node)
    assert make_topology([f"t{i}" for i in range(1000)]) is None
