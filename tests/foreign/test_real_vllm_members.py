"""A real vLLM over two nodes, tensor-parallel on the processor: two agents, two ranks, one replica."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.gang_nodes import GangAgents
from tests.fakes.valkey import running_valkey
from workers.agent import processes
from workers.engines.demo_model import make_demo_model
from workers.protocol import digests
from workers.protocol.observed import ObservedState
from workers.protocol.wish import ModelRef, WantedState

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(5400)]
START_SECONDS = 1500.0
"""A minute and a half on an idle machine, many on a busy one."""
READY, FAILED, STOPPED = ObservedState.READY, ObservedState.FAILED, ObservedState.STOPPED


@pytest.fixture
def gang(tmp_path: Path, vllm_python: Path) -> Iterator[GangAgents]:
    model = tmp_path / "model"
    make_demo_model(model)
    # vLLM's sockets lie in the agents' homes, and their addresses must not be long.
    with tempfile.TemporaryDirectory(prefix="gv") as folder, running_valkey(tmp_path) as valkey:
        gang = GangAgents(
            Path(folder),
            valkey,
            {
                "EXAOPS_AGENT_VLLM_PYTHON": str(vllm_python),
                "EXAOPS_AGENT_CPU_THREADS": "1",
                "EXAOPS_AGENT_STOP_GRACE_SECONDS": "10",
            },
            engine="vllm",
            engine_options={
                "tensor_parallel_size": 2,
                "max_model_len": 2048,
                "enforce_eager": True,
                "kv_cache_memory_bytes": 64 << 20,
                "max_num_seqs": 8,
            },
            model=ModelRef(name="demo", digest="d", source=f"file://{model}"),
            start_seconds=START_SECONDS,
            stall_seconds=0.0,
        )
        gang.start()
        try:
            yield gang
        finally:
            gang.close()


def ask(gang: GangAgents) -> Any:
    head, identity = gang.seen(0), gang.agents[0].identity
    key = digests.engine_api_key(identity.key, head.replica_id, head.attempt)
    request = urllib.request.Request(
        f"http://{head.address}/v1/completions",
        json.dumps({"model": "demo", "prompt": "one two", "max_tokens": 8, "temperature": 0}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310 - http, above
        return json.load(answer)


def living(gang: GangAgents) -> set[processes.ProcessId]:
    return {p for agent in gang.agents for p in processes.labelled(agent.node_id)}


def run_by_vllm(folder: Path) -> set[int]:
    """Whatever vLLM runs here under names that it gives itself, begun in one of these agents' homes."""
    found = set()
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"].startswith("VLLM::") and process.cwd().startswith(str(folder)):
                found.add(process.pid)
    return found


def test_two_ranks_are_one_replica_that_is_ready_whole_ends_whole_and_is_started_anew_whole(
    gang: GangAgents,
) -> None:
    folder = gang.agents[0].home.root.parent
    ready_alone: list[str] = []

    def both_ready() -> bool:
        if gang.seen(1).state is READY and gang.seen(0).pid is None:
            ready_alone.append("rank 1 was ready before its head ran")
        return gang.states == (READY, READY)

    gang.begin_start()
    gang.wait(both_ready, "both ranks are ready", seconds=START_SECONDS)
    assert ready_alone == []
    first = ask(gang)
    assert first["usage"]["completion_tokens"] == 8
    gang.wait(
        lambda: (load := gang.seen(0).telemetry) is not None and (load.generation_tokens_total or 0) >= 8,
        "the head's tokens are counted",
    )
    assert gang.seen(1).telemetry is None

    # Rank 1 dies whole or in part: both end, and nothing begins before the whole is started again.
    group, pid = living(gang), gang.seen(1).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    gang.wait(lambda: gang.seen(1).state is FAILED, "rank 1 has ended", seconds=120)
    assert "killed by SIGKILL" in gang.seen(1).reason
    gang.begin_start()
    gang.wait(both_ready, "both ranks are ready again", seconds=START_SECONDS)
    assert not [process for process in group if processes.is_alive(process)]
    assert (gang.seen(0).attempt, gang.seen(1).attempt) == (2, 2)
    assert ask(gang)["choices"][0]["text"] == first["choices"][0]["text"]

    group = living(gang)
    assert len(group) >= 6  # a shim, what it serves with, and a worker, on either node
    assert len(run_by_vllm(folder)) >= 3  # the core and both workers
    gang.ask(WantedState.STOP, WantedState.STOP)
    gang.wait_states(STOPPED, STOPPED, seconds=120)
    assert living(gang) == set()
    assert not [process for process in group if processes.is_alive(process)]
    assert run_by_vllm(folder) == set()
