"""The KV memory of a node on its page: what it says, to whom it gives a lever, and what became of it."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.audit.models import Event
from exaserve_ops.dashboard.kv import BAR_WIDTH, Named, mark_of, view_kv
from exaserve_ops.dashboard.kv_beyond import kv_beyond
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.kv_pools import LimitsWish
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.kv_pools import record_kv_limits
from exaserve_ops.serving.services.replicas import create_replicas, place_replica
from exaserve_ops.sessions.models import InferenceSession
from tests.dashboard.conftest import MemoryReader
from tests.fakes.kv_pools import load_of, member_of, pool_of, told_by
from tests.fakes.world import NOW, make_deployment, make_node, make_user
from workers.protocol.observed import KvTier, ReplicaTelemetry

pytestmark = pytest.mark.django_db


@pytest.fixture
def node() -> Node:
    return make_node("n1")


@pytest.fixture
def replica(node: Node) -> Replica:
    [made] = create_replicas(make_deployment().pk, 1, why="test", actor="test", now=NOW)
    uuid = node.accelerators.all()[0].uuid
    place_replica(made.pk, Placement(str(node.pk), node.name, (uuid,), "test"), actor="test", now=NOW)
    made.refresh_from_db()
    return made


def told_of(replica: Replica, load: ReplicaTelemetry | None = None, **facts: Any) -> dict[str, Any]:
    loads = {str(replica.pk): load} if load is not None else {}
    return told_by(pool_of(str(replica.pk), **facts), loads=loads)


def text_of(client: Client, node: Node, page: str = "node") -> str:
    answer = client.get(reverse(page, args=[node.pk]))
    assert answer.status_code == 200
    return " ".join(answer.content.decode().split())


def test_page_shows_who_holds_what_and_hands_the_map_over(
    viewer: Client, node: Node, replica: Replica, reader: MemoryReader
) -> None:
    reader.kv[str(node.pk)] = told_of(replica)
    text = text_of(viewer, node)
    assert replica.name in text
    assert "32 of 64 blocks" in text
    assert "16 lent" not in text
    row = re.search(r"<td class=\"num\" data-label=\"Borrowed\">(\d+)</td>", text)
    assert row is not None
    assert row[1] == "16"
    told = re.search(r'data-told="([^"]+)"', text)
    assert told is not None
    [pool] = json.loads(told[1].replace("&quot;", '"'))["pools"]
    assert [cell[0] for cell in pool["cells"]] == [1, 1, 0, 0]


def test_node_that_tells_nothing_says_so(viewer: Client, node: Node) -> None:
    assert "No replica here tells of its KV memory." in text_of(viewer, node)


def test_hits_misses_tiers_and_swaps_are_shown_where_engines_tell(
    viewer: Client, node: Node, replica: Replica, reader: MemoryReader
) -> None:
    reader.kv[str(node.pk)] = told_of(replica, load_of(kv_thrash_reason="40% came and left"))
    InferenceSession.objects.create(
        session_id="s1", model_name="m", replica=replica, last_why="repinned",
        first_turn_at=clock.now(), last_turn_at=clock.now(),
    )  # fmt: skip
    InferenceSession.objects.create(
        session_id="s2", model_name="m", replica=replica, last_why="repinned",
        first_turn_at=NOW, last_turn_at=clock.now() - timedelta(hours=1),
    )  # fmt: skip
    text = text_of(viewer, node, "node_kv")
    for words in (
        "60 %", "no shared prefix", "shorter than a block", "evicted", "whole blocks of 16 tokens",
        "Host memory", "96 of 128 blocks", "without, since the disk is full", "swaps no blocks now: 40% came",
        "34 blocks were swapped out", "conversation of the last 15 min came from another replica",
    ):  # fmt: skip
        assert words in text, words


def test_tiers_add_no_blocks_of_different_pools_and_no_pool_is_larger_than_it_is() -> None:
    view = view_kv(told_by(pool_of("a"), pool_of("b"), loads={"a": load_of(), "b": load_of()}), {})
    computing = [tier for tier in view.tiers if tier.name.startswith("Where it computes, pool ")]
    assert [tier.used_blocks for tier in computing] == [24, 24]
    assert all(
        tier.capacity_blocks <= pool.facts["capacity_blocks"] for tier in computing for pool in view.pools
    )
    alone = view_kv(told_by(pool_of("a"), loads={"a": load_of()}), {})
    assert [tier.name for tier in alone.tiers] == ["Where it computes", "Host memory", "Disk"]


def test_bar_shows_what_is_held_lent_and_brought() -> None:
    told = told_by(pool_of("a", leased_blocks=8, live_blocks=4, cached_blocks=2))
    [row] = view_kv(told, {"a": Named("chat-1", "/r")}).rows
    assert [(p.kind, p.start, p.width) for p in row.bar] == [
        ("live", 0, 250),
        ("cached", 250, 125),
        ("hollow", 375, 125),
        ("lent", 500, 500),
    ]
    assert row.brought_at == BAR_WIDTH
    assert row.label == "chat-1"


def test_marks_tell_dozens_of_replicas_apart() -> None:
    marks = [mark_of(place) for place in range(24)]
    assert len({mark.letter for mark in marks}) == 24
    assert len({(mark.series, mark.striped) for mark in marks[:12]}) == 12


def test_marks_go_on_from_pool_to_pool_and_to_those_alone() -> None:
    told = told_by(
        pool_of("a"),
        pool_of("b"),
        loads={"c": load_of(), "a": load_of(), "d": load_of(kv_total_blocks=None)},
    )
    view = view_kv(told, {})
    assert [(row.replica_id, row.mark.letter) for row in view.rows] == [("a", "A"), ("b", "B"), ("c", "C")]
    assert [row.replica_id for row in view.alone] == ["c"]


def test_sums_of_a_node_add_up_and_nothing_is_divided_by_nothing() -> None:
    view = view_kv(told_by(pool_of("a"), loads={"a": load_of(), "b": load_of()}), {})
    assert (view.hits.ratio, view.hits.query_tokens) == (0.6, 2000.0)
    assert sum(p.width for p in view.hits.bar) == BAR_WIDTH
    assert [tier.used_blocks for tier in view.tiers if "not pooled" in tier.name] == [24, 96, 0]
    assert view.tiers[-1].used_ratio is None
    empty = pool_of("a", leased_blocks=0, live_blocks=0, cached_blocks=0, brought_blocks=0)
    assert view_kv(told_by(empty), {}).hits.ratio is None
    assert view_kv(None, {}).rows == ()


def test_replica_whose_process_is_gone_is_marked(
    viewer: Client, node: Node, replica: Replica, reader: MemoryReader
) -> None:
    reader.kv[str(node.pk)] = told_of(replica, alive=False, leased_blocks=0, live_blocks=0, cached_blocks=0)
    assert ">away</span>" in text_of(viewer, node, "node_kv")


def ask(client: Client, node: Node, **fields: object) -> str:
    """Send the form; what the page says then."""
    answer = client.post(reverse("node_kv_limits", args=[node.pk]), fields, follow=True)
    assert answer.status_code == 200
    return answer.content.decode()


def test_operator_changes_limits_and_the_page_shows_what_the_agent_says(
    node: Node, replica: Replica, reader: MemoryReader
) -> None:
    reader.kv[str(node.pk)] = told_of(replica)
    operator = Client()
    operator.force_login(make_user("otto", "operator"))
    assert "data-kv-limits" in text_of(operator, node)
    wish = {"replica": replica.pk, "minimum_blocks": 32, "ceiling_blocks": 48}
    assert "Say why" in ask(operator, node, **wish)
    assert "whole numbers" in ask(operator, node, **(wish | {"ceiling_blocks": "-1", "reason": "x"}))
    assert "ceiling of 48 blocks.<" in ask(operator, node, **(wish | {"minimum_blocks": 64, "reason": "x"}))
    assert "Not done" in ask(operator, node, **(wish | {"replica": "nobody", "reason": "x"}))
    assert not Event.objects.filter(event="kv_limits_asked").exists()
    assert "is asked" in ask(operator, node, **wish, reason="its neighbour is busy")
    asked = Event.objects.get(event="kv_limits_asked")
    assert (asked.actor, asked.reason) == (
        "user:otto",
        "at least 32 and at most 48 blocks: its neighbour is busy",
    )
    text = LimitsWish(str(node.pk), str(replica.pk), 32, 48).text()
    record_kv_limits(text, node_id=node.pk, done=False, reason="no room", now=clock.now())
    shown = text_of(operator, node, "node_kv")
    assert "keeps its limits of KV blocks" in shown
    assert "at least 32 and at most 48 blocks: no room" in shown
    assert "its neighbour is busy" not in shown, "only the newest word"
    Replica.objects.filter(pk=replica.pk).update(ready_at=clock.now())
    shown = text_of(operator, node, "node_kv")
    assert "no room" not in shown, "a replica that was started anew has its deployment's limits"


def test_viewer_sees_limits_and_changes_none(
    viewer: Client, node: Node, replica: Replica, reader: MemoryReader
) -> None:
    reader.kv[str(node.pk)] = told_of(replica)
    assert "data-kv-limits" not in text_of(viewer, node)
    fields = {"replica": replica.pk, "minimum_blocks": 1, "ceiling_blocks": 2, "reason": "x"}
    assert viewer.post(reverse("node_kv_limits", args=[node.pk]), fields).status_code == 403


def test_names_of_replicas_cannot_break_out_of_the_page(
    viewer: Client, node: Node, reader: MemoryReader
) -> None:
    evil = '"><script>alert(1)</script>'
    pool = pool_of("a")
    reader.kv[str(node.pk)] = told_by(msgspec.structs.replace(pool, pool_id=evil, members=(member_of(evil),)))
    assert "<script>alert" not in text_of(viewer, node)


# -- engines that are not ours ---------------------------------------------------------------------------
def of_engine(replica: Replica, engine: str, **options: Any) -> None:
    release = replica.release
    release.engine, release.engine_options = engine, options
    release.save()


def test_replica_of_vllm_has_memory_of_its_own_and_what_is_behind_it_is_said(
    viewer: Client, node: Node, replica: Replica, reader: MemoryReader
) -> None:
    of_engine(replica, "vllm", kv_offloading_size=64.0)
    load = ReplicaTelemetry(
        window_seconds=10.0,
        kv_total_blocks=1000,
        kv_block_tokens=32,
        kv_capacity_tokens=32_000,
        kv_used_ratio=0.25,
        prefix_hit_ratio=0.5,
        connector_totals={"offload bytes stored": float(3 << 20), "offload stores skipped": 2.0},
    )
    reader.kv[str(node.pk)] = told_by(loads={str(replica.pk): load})
    text = text_of(viewer, node, "node_kv")
    for words in (
        "With KV memory of their own: they neither borrow nor lend", "vLLM", "8 000 tokens",
        "32 000 tokens", "1 000 blocks of 32", "64.0 GiB of host memory",
        "since it started: offload bytes stored 3 MiB · offload stores skipped 2",
    ):  # fmt: skip
        assert words in text, words


def test_replica_of_sglang_that_tells_tokens_alone_is_shown_with_its_host_tier(
    viewer: Client, node: Node, replica: Replica, reader: MemoryReader
) -> None:
    of_engine(replica, "sglang", enable_hierarchical_cache=True, hicache_storage_backend="mooncake")
    load = ReplicaTelemetry(
        window_seconds=10.0,
        kv_capacity_tokens=50_000,
        kv_used_ratio=0.1,
        kv_tiers=(
            KvTier(name="accelerator", used_blocks=10, capacity_blocks=100),
            KvTier(name="host", used_blocks=30, capacity_blocks=200),
        ),
    )
    reader.kv[str(node.pk)] = told_by(loads={str(replica.pk): load})
    text = text_of(viewer, node, "node_kv")
    for words in (
        "SGLang",
        "50 000 tokens",
        "host memory, then mooncake",
        "30 of 200 blocks used",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("engine", "options", "places"),
    [
        ("torch", {"kv_connector": "x"}, ()),
        ("vllm", {}, ()),
        ("vllm", {"kv_connector": "NixlConnector"}, ()),
        ("vllm", {"kvcached": True}, ("takes its card's memory as it needs it (kvcached)",)),
        (
            "vllm",
            {"kv_offloading_size": 8, "kv_offloading_backend": "lmcache"},
            ("8 GiB of host memory, by LMCache",),
        ),
        ("vllm", {"kv_connector": "OffloadingConnector"}, ("host memory, by OffloadingConnector",)),
        (
            "vllm",
            {"kv_connector": "LMCacheConnectorV1", "lmcache_cpu_gb": 5.5},
            ("5.5 GB of host memory for each rank, by LMCache",),
        ),
        ("vllm", {"kv_connector": "MooncakeStoreConnector"}, ("what MooncakeStoreConnector reaches",)),
        ("sglang", {"enable_lmcache": True}, ("LMCache",)),
        (
            "sglang",
            {"enable_hierarchical_cache": True, "hicache_size": 64},
            ("64 GB of host memory for each rank",),
        ),
        ("sglang", {"hicache_size": 64}, ()),
    ],
)
def test_options_say_what_is_behind_an_engines_own_memory(
    engine: str, options: dict[str, object], places: tuple[str, ...]
) -> None:
    assert kv_beyond(engine, options) == places
