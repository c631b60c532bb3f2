"""Two stages of one model on two nodes, each with an agent of its own: they start, answer and end as one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fakes.cable import Cable, NoNamespaceError, cable
from tests.fakes.gang_nodes import GangAgents
from tests.fakes.valkey import running_valkey
from workers.agent import processes
from workers.engines.demo_model import make_demo_model
from workers.protocol import digests
from workers.protocol.observed import ObservedState
from workers.protocol.wish import ModelRef, WantedState

READY, FAILED, STOPPED = ObservedState.READY, ObservedState.FAILED, ObservedState.STOPPED
START_SECONDS = 150.0


@contextmanager
def staged(folder: Path, line: Cable | None = None) -> Iterator[GangAgents]:
    """Two agents. Member 1's node is this machine, or a namespace at the other end of a cable."""
    make_demo_model(folder / "model")
    with running_valkey(folder) as valkey:
        gang = GangAgents(
            folder,
            valkey,
            {"EXAOPS_AGENT_CPU_THREADS": "1"},
            prefixes=((), line.prefix if line else ()),
            hosts=(line.control, line.node) if line else ("127.0.0.1", "127.0.0.1"),
            engine="torch",
            engine_options={"pipeline_stages": 2, "num_blocks": 64},
            model=ModelRef(name="demo", digest="d", source=f"file://{folder / 'model'}"),
            start_seconds=START_SECONDS,
        )
        gang.start()
        try:
            yield gang
        finally:
            gang.close()


def ask(gang: GangAgents) -> str:
    """Greedy text of the head."""
    head = gang.seen(0)
    key = digests.engine_api_key(gang.agents[0].identity.key, head.replica_id, head.attempt)
    body = {"model": "demo", "prompt": "one two", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"http://{head.address}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    return str(answer.json()["choices"][0]["text"])


def living(gang: GangAgents) -> set[processes.ProcessId]:
    return {p for agent in gang.agents for p in processes.labelled(agent.node_id)}


def start(gang: GangAgents) -> str:
    gang.begin_start()
    gang.wait_states(READY, READY, seconds=START_SECONDS)
    return ask(gang)


@pytest.mark.timeout(600)
def test_stages_of_two_agents_answer_end_together_and_come_back_with_the_next_start(tmp_path: Path) -> None:
    with staged(tmp_path) as gang:
        first = start(gang)
        assert gang.seen(1).telemetry is None
        group, pid = living(gang), gang.seen(1).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        gang.wait_states(FAILED, FAILED, seconds=120)
        assert start(gang) == first
        assert not [process for process in group if processes.is_alive(process)]
        gang.ask(WantedState.STOP, WantedState.STOP)
        gang.wait_states(STOPPED, STOPPED, seconds=120)
        assert living(gang) == set()


@pytest.mark.namespaces
@pytest.mark.timeout(1200)
def test_stages_on_two_networks_end_when_the_cable_between_them_is_cut(tmp_path: Path) -> None:
    try:
        with cable() as line, staged(tmp_path, line) as gang:
            first = start(gang)
            group = living(gang)
            line.cut("cable")
            gang.wait_states(FAILED, FAILED, seconds=300)  # agents are heard on: their store is no network's
            assert not [process for process in group if processes.is_alive(process)]
            line.mend("cable")
            assert start(gang) == first
    except NoNamespaceError as error:
        pytest.skip(str(error))
