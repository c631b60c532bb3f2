"""What an engine tells beside the usual figures, as its replica's page says it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.dashboard.engine_words import told_of
from exaserve_ops.dashboard.sleep_words import SleepSight, sleep_words
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.models import Replica
from tests.dashboard.conftest import MemoryReader, World
from workers.protocol.observed import ReplicaTelemetry

UNKNOWN = SleepSight("")
SINCE = datetime(2026, 3, 4, 10, 20, 30, tzinfo=UTC)


def words(**load: Any) -> dict[str, str]:
    told = told_of(msgspec.structs.asdict(ReplicaTelemetry(window_seconds=10.0, **load)), UNKNOWN)
    return {row.name: f"{row.text} {row.detail}".strip().replace("\u202f", " ") for row in told}


def test_what_is_not_told_has_no_words_and_zero_has() -> None:
    silent = words()
    assert set(silent.values()) == {""}
    told = words(preemptions_total=0.0, requests_waiting=0, requests_total=0.0, external_hit_tokens_total=0.0)
    assert told["Set back for lack of room"] == "0 since it started"
    assert told["Waiting for"] == "nothing"
    assert told["Requests ended"] == "0 since it started"
    assert told["Cache beyond its own"] == "0 tokens found since it started"
    assert told_of({}, UNKNOWN) == []


def test_quantile_beyond_what_the_engine_can_tell_is_more_than_its_last_bucket() -> None:
    told = words(queue_p50_seconds=0.3, queue_p95_seconds=80.0, lower_bounds=("queue_p95_seconds",))
    assert told["In the queue, p95"] == "> 1 min 20 s p50 300 ms"


def test_all_that_real_engines_tell_is_said_in_words() -> None:
    told = words(
        requests_waiting=72,
        waiting_by_reason={"capacity": 70.0, "deferred": 2.0},
        sleep_state="weights_offloaded",
        kv_capacity_tokens=116_496,
        kv_block_tokens=16,
        kv_capacity_is_estimate=True,
        kv_cached_tokens=4096,
        kv_evicted_idle_seconds=40.0,
        preemptions_total=3.0,
        preemptions_per_second=0.5,
        outcomes_total={"length": 2.0, "stop": 7.0, "odd_one": 1.0},
        external_hit_tokens_total=552.0,
        external_hit_ratio=0.92,
        connector_totals={"nixl bytes": 1_180_000.0, "nixl transfers": 3.0, "seconds in transfer": 1.5},
        generation_tokens_by_model={"base": 10.0, "tuned": 5.0},
    )
    assert told["Waiting for"] == "capacity 70 · deferred 2"
    assert told["Sleep"].startswith("asleep by its engine's word weights in host memory")
    assert told["KV room"].startswith("116 496 tokens in blocks of 16, worked out of labels")
    assert told["Cached prefixes"] == "4 096 tokens what went last had been unused for 40 s"
    assert told["Set back for lack of room"] == "3 since it started 0.50 a second now"
    assert told["Requests ended"].startswith("finished 7 · reached their limit 2 · odd one 1")
    assert told["Cache beyond its own"].startswith("552 tokens found since it started 92 %")
    assert told["KV connector"].startswith(
        "nixl bytes 1.13 MiB · nixl transfers 3 · seconds in transfer 1.5 s"
    )
    assert told["Tokens by model"].startswith("base 10 · tuned 5")


@pytest.mark.parametrize(
    ("sight", "text", "detail"),
    [
        (SleepSight("asleep", SINCE, told=""), "asleep", "since 2026-03-04 10:20:30 UTC"),
        (SleepSight("asleep", SINCE, told="discard_all"), "asleep", "UTC, weights and KV given up"),
        (SleepSight("falling_asleep", SINCE), "falling asleep", "since 2026-03-04"),
        (SleepSight("waking", SINCE, told="discard_all"), "waking", "10:20:30 UTC"),
        (SleepSight("", told="weights_offloaded"), "asleep by its engine's word", "did not put it to sleep"),
        (SleepSight("", answers=True), "awake", "it is not to sleep"),
        (SleepSight("", told="awake", answers=True, is_to_sleep=True), "awake", "once nothing runs on it"),
        (SleepSight("", answers=True, is_to_sleep=True, note="it fell"), "awake", "it is to sleep: it fell"),
        (SleepSight("", answers=True, refusal="it cannot"), "awake, always", "it cannot"),
        (SleepSight(""), "", ""),
    ],
)
def test_whether_it_sleeps_is_said_by_the_record_even_where_its_engine_has_no_word_for_it(
    sight: SleepSight, text: str, detail: str
) -> None:
    said, beside = sleep_words(sight)
    assert said == text
    assert detail in beside


def test_page_of_a_sleeper_says_since_when(operator: Client, world: World) -> None:
    node, since = Node.objects.get(), clock.now()
    sleeper = Replica.objects.filter(pk=world["replica_id"])
    sleeper.update(node=node, status="ready", sleep_state="asleep", sleep_since=since)
    address, asked = reverse("replica_state", args=[world["replica_id"]]), {"part": "told"}
    page = operator.get(address, asked).content.decode()
    assert f"since {since:%Y-%m-%d %H:%M:%S} UTC" in page.partition("<dt>Sleep</dt>")[2]


def test_page_of_a_replica_says_what_its_engine_does_not_tell(
    operator: Client, world: World, reader: MemoryReader
) -> None:
    node = Node.objects.get()
    Replica.objects.filter(pk=world["replica_id"]).update(node=node)
    address = reverse("replica_state", args=[world["replica_id"]])
    asked = {"part": "told"}
    assert "Nothing is known of its engine now" in operator.get(address, asked).content.decode()
    load = {"ttft_p95_seconds": 80.0, "lower_bounds": ["ttft_p95_seconds"], "preemptions_total": 4.0}
    reader.nodes[str(node.pk)] = {
        "received_at": clock.unix_seconds(),
        "replicas": {str(world["replica_id"]): {"state": "ready", "load": load}},
    }
    told = operator.get(address, asked).content.decode()
    assert "4 since it started" in told
    assert told.count("not told by this engine") == 4
    assert "not known while it is not ready" in told.partition("<dt>Sleep</dt>")[2].partition("</dd>")[0]
    assert told.count("no request in the last seconds, or not told") == 3
    state = operator.get(address).content.decode().replace("\u202f", " ")
    assert "&gt; 1 min 20 s" in state
    assert (
        "Told by the engine" in operator.get(reverse("replica", args=[world["replica_id"]])).content.decode()
    )
