"""One agent, one pool, two real engines: one hoards, scribbles and dies; the other answers as before."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest
import torch

from tests.fakes.node import Node, make_home, make_spec, wait_for
from tests.fakes.valkey import running_valkey
from workers.agent import processes
from workers.engines.demo_model import make_demo_model
from workers.engines.torch_engine.config import read_model_config
from workers.engines.torch_engine.kv_pool import layout_of
from workers.protocol import digests, v1
from workers.protocol.kv_pools import KvPool, KvPoolMember
from workers.protocol.observed import ObservedState, ReplicaObserved
from workers.protocol.wish import ModelRef

SCRIPT = Path(__file__).parents[1] / "fakes" / "rogue_agent.py"
BLOCKS = 64
PROMPT = "All that is gold does not glitter, not all those who wander are lost; "
PATIENCE_SECONDS = 60.0
"""For what takes three seconds on an idle machine."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_valkey(tmp_path) as valkey:
        node = Node(make_home(tmp_path / "home", valkey.url), valkey)
        node.script = SCRIPT
        node.start()
        try:
            yield node
        finally:
            node.close()
            assert not processes.labelled(node.node_id)


class Neighbours:
    """The two replicas of the node."""

    def __init__(
        self, node: Node, folder: Path, *, ceiling: int = BLOCKS, stall_seconds: float = 60.0
    ) -> None:
        self.node = node
        self.deed_file = folder / "deed"
        make_demo_model(folder / "model")
        model = ModelRef(name="demo", digest="sha256:demo", source=f"file://{folder / 'model'}")
        layout = layout_of(read_model_config(folder / "model"), torch.float32)
        victim = make_spec(
            "victim", model=model, engine="torch",
            engine_options={"num_blocks": BLOCKS, "threads": 1, "dtype": "float32"}, start_seconds=120.0,
        )  # fmt: skip
        rogue = make_spec(
            "rogue", model=model, engine="rogue",
            engine_options={
                "blocks": BLOCKS,
                "ceiling": ceiling, "layout": json.dumps(asdict(layout)), "deed_file": str(self.deed_file)
            },
            stall_seconds=stall_seconds,
        )  # fmt: skip
        node.wish(victim, rogue)
        self.victim = self.ready("victim", 1)
        self.rogue = self.ready("rogue", 1)

    def ready(self, replica_id: str, attempt: int) -> ReplicaObserved:
        return self.node.wait_state(
            replica_id, ObservedState.READY, attempt=attempt, seconds=PATIENCE_SECONDS
        )

    def answer(self, prompt: str) -> str:
        """What the victim says, greedily."""
        key = digests.engine_api_key(self.node.identity.key, "victim", 1)
        body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"http://{self.victim.address}/v1/completions",
            json=body,
            headers={"Authorization": f"Bearer {key}"},
            timeout=PATIENCE_SECONDS,
        )
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def answers(self) -> list[str]:
        """Several at once, which fill all that the victim is guaranteed."""
        prompts = [f"{number} {PROMPT * (number + 1)}" for number in range(6)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.answer, prompts))

    def pool(self) -> KvPool:
        """As the newest heartbeat tells that has one with both of them."""

        def found() -> KvPool | None:
            beat = self.node.heartbeat()
            pools = beat.kv_pools if beat is not None else ()
            return next((pool for pool in pools if len(pool.members) == len({"victim", "rogue"})), None)

        return wait_for(found, "the pool is reported", seconds=PATIENCE_SECONDS)

    def row(self, replica_id: str) -> KvPoolMember:
        return next(row for row in self.pool().members if row.replica_id == replica_id)

    def wait_hoarded(self, blocks: int = BLOCKS) -> None:
        """Until the rogue holds all that it may."""
        wait_for(lambda: self.row("rogue").leased_blocks >= blocks, "it hoards", seconds=PATIENCE_SECONDS)

    def wait_reclaimed(self, more_than: int) -> int:
        wait_for(
            lambda: self.pool().reclaimed_extents > more_than, "it is reclaimed", seconds=PATIENCE_SECONDS
        )
        return self.pool().reclaimed_extents

    def exit_signal(self, attempt: int) -> int | None:
        """How an attempt of the rogue ended."""
        seen = self.node.replica("rogue")
        last = seen.last_exit if seen is not None else None
        return last.signal if last is not None and last.attempt == attempt else None


def test_engine_that_hoards_scribbles_and_dies_harms_no_answer_of_its_neighbour(
    node: Node, tmp_path: Path
) -> None:
    neighbours = Neighbours(node, tmp_path)
    expected = neighbours.answers()
    assert len(set(expected)) > 1

    neighbours.wait_hoarded()
    assert neighbours.answers() == expected, "while the other hoards, and writes without a pause"

    with ThreadPoolExecutor(1) as pool:
        during = pool.submit(neighbours.answers)
        neighbours.deed_file.touch()
        wait_for(
            lambda: neighbours.exit_signal(1) == signal.SIGSEGV, "it dies of it", seconds=PATIENCE_SECONDS
        )
        assert during.result(PATIENCE_SECONDS) == expected, "while the other scribbles and dies"
    reclaimed = neighbours.wait_reclaimed(0)
    assert neighbours.answers() == expected, "in memory that was the other's"

    again = neighbours.ready("rogue", 2)
    neighbours.wait_hoarded()
    assert again.pid is not None
    os.kill(again.pid, signal.SIGKILL)
    wait_for(lambda: neighbours.exit_signal(2) == signal.SIGKILL, "it is killed", seconds=PATIENCE_SECONDS)
    neighbours.wait_reclaimed(reclaimed)
    assert neighbours.answers() == expected, "after a kill in the middle of a write"

    victim = node.replica("victim")
    assert victim is not None
    assert (victim.pid, victim.attempt, victim.restarts) == (neighbours.victim.pid, 1, 0)
    assert neighbours.pool().damaged_blocks == 0


def test_engine_that_keeps_what_its_neighbour_is_guaranteed_is_ended(node: Node, tmp_path: Path) -> None:
    neighbours = Neighbours(node, tmp_path, ceiling=2 * BLOCKS, stall_seconds=5.0)
    neighbours.wait_hoarded(BLOCKS + 16)

    def ended_for_it() -> bool:
        neighbours.answers()  # which wait for what the other keeps, and come
        seen = [r.last_exit for beat in node.all(v1.Heartbeat) for r in beat.replicas if r.last_exit]
        return any("keeps KV blocks that other replicas are guaranteed" in last.why for last in seen)

    wait_for(ended_for_it, "the hoarder is ended", seconds=PATIENCE_SECONDS)


def test_limits_reach_a_running_engine_and_outlive_the_agent(node: Node, tmp_path: Path) -> None:
    neighbours = Neighbours(node, tmp_path)
    for minimum, ceiling in ((BLOCKS, BLOCKS + 16), (16, BLOCKS)):
        node.send(
            v1.SetKvLimits(
                command_id=f"limits-{minimum}", lease_epoch=1, deadline_seconds=60, replica_id="victim",
                minimum_blocks=minimum, ceiling_blocks=ceiling,
            )
        )  # fmt: skip

    def said(command_id: str) -> v1.CommandResult | None:
        return next((r for r in node.all(v1.CommandResult) if r.command_id == command_id), None)

    assert wait_for(lambda: said(f"limits-{BLOCKS}"), "the first is answered").outcome == "done"
    refused = wait_for(lambda: said("limits-16"), "the second is answered")
    assert refused.outcome == "refused"
    assert f"the longest request takes {BLOCKS} blocks" in refused.reason
    node.signal(signal.SIGKILL)
    node.forget_reports()
    node.start()
    wait_for(lambda: node.heartbeat() is not None, "the next agent reports")
    wait_for(lambda: neighbours.row("victim").ceiling_blocks == BLOCKS + 16, "the limits hold")
    assert neighbours.row("victim").guaranteed_blocks == BLOCKS
    assert neighbours.row("victim").alive
