"""The pages say who feeds whom, what is slow and why, and what left the origin."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.dashboard.swarms import MOST_STREAMS, swarm_page
from exaserve_ops.inventory.models import FailureDomain, Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Model
from exaserve_ops.weights.domain.held import ComplaintSight, HeldWeights, PullSight, StoreSight, SwarmSight
from exaserve_ops.weights.domain.swarm_notes import Judged
from exaserve_ops.weights.domain.swarms import Place, SwarmFacts, swarm_health
from tests.dashboard.conftest import MemoryReader
from tests.fakes.swarm_sights import PIECE, ToldSwarm, told_swarm
from tests.fakes.world import make_node

pytestmark = pytest.mark.django_db


@pytest.fixture
def model(stored_model: Model) -> Model:
    return stored_model


@pytest.fixture
def nodes(model: Model) -> list[Node]:
    """Two racks of three, for weights of a thousand pieces."""
    model.files.exclude(path__endswith=".safetensors").delete()
    model.files.update(size_bytes=1000 * PIECE)
    made = []
    for number in range(6):
        node = make_node(f"w{number}")
        rack, _ = FailureDomain.objects.get_or_create(kind="rack", name=f"rack-{number // 3}")
        node.failure_domain.parent = rack
        node.failure_domain.save()
        made.append(node)
    return made


def told(model: Model, nodes: list[Node], **noted: object) -> ToldSwarm:
    places = [(str(node.pk), f"rack-{number // 3}") for number, node in enumerate(nodes)]
    return told_swarm(model.digest, places, **noted)  # type: ignore[arg-type]  # fields of a test


def show(reader: MemoryReader, swarm: ToldSwarm) -> None:
    reader.weights, reader.swarms = dict(swarm.sights), dict(swarm.notes)


def part(client: Client, model: Model) -> str:
    return client.get(reverse("weights_swarm_now", args=[model.pk])).content.decode()


def with_pull(sight: StoreSight, **changes: object) -> StoreSight:
    """The first stripe of the only revision, changed."""
    (held,) = sight.held
    assert held.swarm is not None
    first, *rest = held.swarm.pulls
    pulls = (replace(first, **changes), *rest)  # type: ignore[arg-type]  # fields of a test
    return replace(sight, held=(replace(held, swarm=replace(held.swarm, pulls=pulls)),))


def test_a_live_swarm_shows_a_tree_for_each_stripe_with_every_node_by_rack(
    viewer: Client, reader: MemoryReader, model: Model, nodes: list[Node]
) -> None:
    show(reader, told(model, nodes))
    text = part(viewer, model)
    assert "Stripe 1 of 2" in text
    assert "Stripe 2 of 2" in text
    trees = re.findall(r"<svg viewBox.*?</svg>", text, flags=re.DOTALL)
    assert len(trees) == 2
    for tree in trees:
        assert {f"w{n}" for n in range(6)} == set(re.findall(r"<title>(w\d):", tree))
        assert "rack-0" in tree
        assert "rack-1" in tree
        assert tree.count('<path class="t-flowing"') == 6, "each node is fed once"
        assert "1 of them by the origin" in tree
        assert re.search(r"[123] stream(s cross| crosses)", tree)
    assert "time left not known" not in text
    assert "0.50</b> copies left the origin" in text
    assert "3\u202f000</b> of 6\u202f000 pieces, 12 on their way" in text


def test_the_slowest_streams_come_first_with_what_holds_them_up_in_words(
    viewer: Client, reader: MemoryReader, model: Model, nodes: list[Node]
) -> None:
    swarm = told(model, nodes)
    slow, capped = str(nodes[4].pk), str(nodes[5].pk)
    swarm.sights[slow] = with_pull(swarm.sights[slow], bytes_per_second=1e6, bottleneck="disk")
    swarm.sights[capped] = with_pull(swarm.sights[capped], bytes_per_second=2e6, bottleneck="cap")
    # One more, that sees a slow network: its parent says that it is a cap of its own.
    child, parent = next(
        (f.child, f.parent)
        for f in swarm.notes[model.digest].feeds
        if f.stripe == 0 and f.parent != "origin" and f.child not in (slow, capped)
    )
    swarm.sights[child] = with_pull(swarm.sights[child], bytes_per_second=3e6)
    (given,) = swarm.sights[parent].held
    assert given.swarm is not None
    gives = replace(given.swarm, capped=frozenset({child}))
    swarm.sights[parent] = replace(swarm.sights[parent], held=(replace(given, swarm=gives),))
    show(reader, swarm)
    rows = re.findall(r"<tbody>.*</tbody>", part(viewer, model), flags=re.DOTALL)[-1].split("<tr>")[1:]
    assert "w4" in rows[0]
    assert "its disk" in rows[0]
    assert "w5" in rows[1]
    assert "its cap" in rows[1]
    assert "its parent&#x27;s cap" in rows[2]


def test_barred_and_slow_peers_are_named_with_the_reason_and_no_bare_id(
    viewer: Client, reader: MemoryReader, model: Model, nodes: list[Node]
) -> None:
    ids = [str(node.pk) for node in nodes]
    judged = Judged(
        {ids[1]: "2 of its pieces were damaged", ids[2]: f"{ids[0]}, {ids[3]} cannot pull from it"},
        {ids[3]: 2e6},
        parted=((ids[5], ids[4]),),
    )
    show(reader, told(model, nodes, judged=judged))
    text = re.sub(r"<[^>]*>", " ", part(viewer, model))
    assert "Nobody pulls from it: 2 of its pieces were damaged." in text
    assert "Nobody pulls from it: w0, w3 cannot pull from it." in text
    assert "Its streams brought 2.0 MB/s in all; those of others bring far more." in text
    assert "It cannot pull from w4." in text
    assert not any(node_id in text for node_id in ids)


def test_what_waits_for_the_origin_and_what_failed_say_so_and_no_end_is_promised(
    viewer: Client, reader: MemoryReader, model: Model, nodes: list[Node]
) -> None:
    swarm = told(model, nodes)
    waits, failed = str(nodes[0].pk), str(nodes[1].pk)
    total = swarm.notes[model.digest].total_bytes
    pull = PullSight(0, "origin", "waiting", why="origin: it does not answer")
    held = HeldWeights(model.digest, "fetching", total, 0, wanted=True, swarm=SwarmSight(pulls=(pull,)))
    swarm.sights[waits] = StoreSight(1, held=(held,))
    reason = "insufficient space: 9 bytes are needed"
    swarm.sights[failed] = StoreSight(
        1, held=(HeldWeights(model.digest, "failed", total, 0, reason=reason, wanted=True),)
    )
    why = "the origin does not answer, and no node has the weights"
    swarm.notes[model.digest] = replace(swarm.notes[model.digest], waiting=((waits, why),))
    show(reader, swarm)
    text = part(viewer, model)
    assert "The origin does not answer, and no node has the weights." in text
    assert "Insufficient space: 9 bytes are needed." in text
    assert "time left not known" in text
    assert 'class="t-failed"' in text


def test_without_a_swarm_the_page_says_when_there_is_one(
    viewer: Client, reader: MemoryReader, model: Model
) -> None:
    assert "No swarm: where two nodes or more" in part(viewer, model)
    everything = viewer.get(reverse("weights")).content.decode()
    assert "Nothing goes from node to node now." in everything
    figure = viewer.get(reverse("weights_swarm_figure", args=[model.pk])).json()
    assert figure["data"] == []
    assert reader.swarms == {}


def test_a_swarm_that_is_over_tells_how_long_it_took_and_what_left_the_origin(
    viewer: Client, reader: MemoryReader, model: Model, nodes: list[Node]
) -> None:
    now = clock.unix_seconds()
    whole = dict.fromkeys((str(node.pk) for node in nodes), 1.0)
    total = 1000 * PIECE
    show(
        reader,
        told(
            model,
            nodes,
            ratios=whole,
            began_at_seconds=now - 150,
            ended_at_seconds=now - 30,
            feeds=(),
            origin_bytes=total,
        ),
    )
    text = part(viewer, model)
    assert "took <b>2\u202fmin</b>" in text
    assert "1.00</b> copies left the origin" in text
    assert "Stripe 1" not in text
    assert "1.00 copies" in viewer.get(reverse("weights")).content.decode()
    figure = viewer.get(reverse("weights_swarm_figure", args=[model.pk]), {"columns": "1"}).json()
    copies = figure["data"][0]["y"]
    assert copies[0] == 0.0
    assert copies[-1] == 0.5
    assert len(figure["data"]) == 3


def test_a_swarm_that_no_leader_has_noted_is_told_from_what_nodes_say(
    viewer: Client, reader: MemoryReader, model: Model, nodes: list[Node]
) -> None:
    swarm = told(model, nodes)
    child = str(nodes[2].pk)
    (held,) = swarm.sights[child].held
    assert held.swarm is not None
    complaint = ComplaintSight(str(nodes[0].pk), bad_pieces=1)
    seen = replace(held.swarm, complaints=(complaint,))
    swarm.sights[child] = replace(swarm.sights[child], held=(replace(held, swarm=seen),))
    reader.weights = dict(swarm.sights)
    text = part(viewer, model)
    assert "Stripe 2 of 2" in text
    assert "of 6 nodes whole" in text


def test_a_fleet_of_racks_is_drawn_with_every_node_in_a_place_of_its_own_and_few_rows_of_streams() -> None:
    places = [(f"n{number:03}", f"rack-{number // 16:02}") for number in range(256)]
    swarm = told_swarm("sha256:0", places)
    names = {node_id: Place(node_id, rack) for node_id, rack in places}
    facts = SwarmFacts("sha256:0", 1000 * PIECE, swarm.sights, names, swarm.notes["sha256:0"])
    page = swarm_page(swarm_health(facts))
    assert [len(tree.cells) for tree in page.trees] == [256, 256]
    for tree in page.trees:
        assert len({(cell.x, cell.y) for cell in tree.cells}) == 256
        assert all(0 <= cell.x <= tree.width - 9 for cell in tree.cells)
        assert all(0 <= cell.y <= tree.height - 9 for cell in tree.cells)
        assert [band.name for band in tree.bands] == [f"rack-{n:02}" for n in range(16)]
    assert len(page.streams) == MOST_STREAMS
    assert page.more_streams == 512 - MOST_STREAMS
