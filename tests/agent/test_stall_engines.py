"""Engines that stand still in real processes are healed; busy and idle ones are left alone."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_spec
from workers.agent.supervisor import Policy
from workers.engines.simulated import SimulatedAdapter
from workers.protocol.observed import ObservedState


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    node = LocalNode(tmp_path / "home")
    yield node
    node.close()


def test_frozen_counters_of_an_answering_engine_are_a_crash(node: LocalNode, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("500")
    spec = make_spec("r1", stall_seconds=1.5, engine_options={"running": 2, "tokens_file": str(tokens)})
    node.wish(spec)
    node.wait_state("r1", ObservedState.READY, attempt=2)
    replica = node.replica("r1")
    assert replica.restarts == 1
    assert replica.last_exit is not None
    assert replica.last_exit.signal in (signal.SIGTERM, signal.SIGKILL)
    assert replica.last_exit.why.startswith("stalled: 2 requests run and no token came for ")


def test_engine_that_stalls_over_and_over_is_given_up_with_the_reason(
    node: LocalNode, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("500")
    spec = make_spec("r1", stall_seconds=0.5, engine_options={"running": 1, "tokens_file": str(tokens)})
    node.wish(spec)
    replica = node.wait_state("r1", ObservedState.FAILED)
    assert replica.reason.startswith("ended 3 times in a row, given up: stalled: 1 request runs")


def test_idle_engine_and_busy_one_outlive_the_stall_limit(node: LocalNode, tmp_path: Path) -> None:
    tokens, slow = tmp_path / "tokens", tmp_path / "slow"
    tokens.write_text("500")
    idle = make_spec("idle", stall_seconds=1.0, engine_options={"running": 0, "tokens_file": str(tokens)})
    options = {"running": 9, "tokens_per_second": 50.0, "health_seconds": 2.5, "slow_file": str(slow)}
    busy = make_spec("busy", stall_seconds=6.0, engine_options=options)
    node.wish(idle, busy)
    node.wait_state("idle", ObservedState.READY)
    node.wait_state("busy", ObservedState.READY)
    slow.touch()

    def is_late() -> bool:
        telemetry = node.replica("busy").telemetry
        return telemetry is not None and "busy: health answered late" in telemetry.notes

    node.wait(is_late, "health came late")
    looked = node.scraper.state(("busy", 1)).progress

    def looked_on() -> bool:
        now = node.scraper.state(("busy", 1)).progress
        return (now.looked_at_seconds or 0) > (looked.looked_at_seconds or 0) + 7.0

    node.wait(looked_on, "it was looked at for longer than its stall limit")
    assert [node.replica(name).attempt for name in ("idle", "busy")] == [1, 1]
    assert node.replica("busy").state is ObservedState.READY


def test_closed_port_of_a_living_process_is_healed(node: LocalNode, tmp_path: Path) -> None:
    switch = tmp_path / "close"
    node.wish(make_spec("r1", engine_options={"close_file": str(switch)}))
    node.wait_state("r1", ObservedState.READY, attempt=1)
    switch.touch()
    node.wait_state("r1", ObservedState.READY, attempt=2)
    last = node.replica("r1").last_exit
    assert last is not None
    assert last.why == "dead: health: connection refused, 3 times in a row"


def test_stopped_engine_with_an_open_request_is_killed_and_started_again(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    adapter = SimulatedAdapter()
    node = LocalNode(tmp_path / "home", adapter=adapter, policy=Policy(stop_grace_seconds=0.5, crash_limit=3))
    try:
        node.adapters["simulated"] = adapter
        spec = make_spec(
            "r1", engine="simulated", stall_seconds=2.0, engine_options={"ttft_ms": 10.0, "itl_ms": 20.0}
        )
        node.wish(spec)
        ready = node.wait_state("r1", ObservedState.READY)
        key = node.runner.api_key("r1", 1)
        client = threading.Thread(target=_chat, args=(ready.address, key), daemon=True)
        client.start()
        node.wait(lambda: (node.replica("r1").active_requests or 0) > 0, "the request is seen")
        node.wait(lambda: (node.replica("r1").telemetry.generation_tokens_total or 0) > 0, "a token came")  # type: ignore[union-attr]  # ready
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGSTOP)
        replica = node.wait_state("r1", ObservedState.READY, attempt=2)
        client.join(20)
        assert replica.last_exit is not None
        assert replica.last_exit.why.startswith("stalled: ")
    finally:
        node.close()


def _chat(address: str, key: str) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3000,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=60).read()  # noqa: S310 - loopback
    except OSError:
        return  # the engine is killed under it
