"""The comparison of routing policies: it runs through real routers, and says what it left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.routing.__main__ import main
from bench.routing.lockstep import make_body
from bench.traces import TraceRequest, make_conversations, with_bursts


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["--json", *arguments]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_trace_goes_through_our_gateway_and_beginnings_meet(capsys: pytest.CaptureFixture[str]) -> None:
    ours = "exaserve-gateway"
    told = run(capsys, "--limit", "60", "--replicas", "4", "--policy", "round_robin", "--policy", ours)
    assert told["simulated"] is True
    assert told["missing"] == {}
    assert told["policies"][ours]["hit_ratio"] > told["policies"]["round_robin"]["hit_ratio"]
    assert told["policies"][ours]["ttft_p99_seconds"] > 0


def test_two_gateways_that_tell_one_another_find_most_of_what_one_finds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--limit", "200", "--replicas", "4", "--policy", "round_robin")
    told = run(capsys, *arguments, "--policy", "exaserve-gateway, two")["policies"]
    assert told["exaserve-gateway, two"]["hit_ratio"] > told["round_robin"]["hit_ratio"]


def test_router_that_is_not_installed_is_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, "--limit", "5", "--policy", "vllm-router cache_aware", "--vllm-python", "/no/python")
    assert told["policies"] == {}
    assert "/no/python" in told["missing"]["vllm-router cache_aware"]


def test_bursts_of_long_prompts_hurt_short_ones_less_with_a_class_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, without = "exaserve", "exaserve, no class of long prompts"
    arguments = ("--limit", "400", "--burst", "30", "--policy", ours, "--policy", without)
    told = run(capsys, *arguments)["policies"]
    assert told[ours]["short_ttft_p99_seconds"] < told[without]["short_ttft_p99_seconds"] / 2
    assert told[ours]["goodput_ratio"] > told[without]["goodput_ratio"]


def test_prompts_find_more_in_cache_where_replicas_tell_what_they_evicted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, untold = "exaserve", "exaserve, told of no evictions"
    told = run(capsys, "--limit", "1200", "--kv-blocks", "100", "--policy", ours, "--policy", untold)[
        "policies"
    ]
    assert told[ours]["goodput_ratio"] >= told[untold]["goodput_ratio"]
    assert told[ours]["short_ttft_p99_seconds"] < told[untold]["short_ttft_p99_seconds"]


def test_equal_prefixes_are_equal_text_and_prompts_have_the_traces_lengths() -> None:
    one, other = (
        json.loads(make_body(TraceRequest(0.0, 1000, 5, ids), 1))["messages"][0]["content"]
        for ids in ((7, 8), (7, 9))
    )
    assert len(one) == len(other) == 4000
    assert one[:2048] == other[:2048]
    assert one[2048:] != other[2048:]


def test_added_bursts_share_nothing_with_the_trace_or_one_another() -> None:
    trace = make_conversations(sessions=20, turns=3, seconds=300, seed=1)
    known = {block for request in trace for block in request.prefix_ids}
    added = [r for r in with_bursts(trace, prompts=5, every_seconds=120, seed=1) if r not in trace]
    blocks = [block for request in added for block in request.prefix_ids]
    assert len(added) >= 10
    assert len(set(blocks)) == len(blocks)
    assert not known & set(blocks)
