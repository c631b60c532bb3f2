"""A real agent on cards that give memory back late: launches wait for it, and none is burnt."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.cards import TOTAL_MIB, FakeCards
from tests.fakes.node import Node, make_home, make_spec, wait_for
from tests.fakes.valkey import Valkey, running_valkey
from workers.protocol.observed import MemoryWait, ObservedState, ReplicaObserved
from workers.protocol.wish import ReplicaSpec, WantedState

pytestmark = pytest.mark.timeout(150)

NEEDED_MIB = 60 * 1024


@pytest.fixture
def cards(tmp_path: Path) -> FakeCards:
    return FakeCards(tmp_path, 1)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
def agent(tmp_path: Path, cards: FakeCards, valkey: Valkey) -> Iterator[Callable[..., Node]]:
    started: list[Node] = []

    def start(**settings: str) -> Node:
        node = Node(make_home(tmp_path / "home", valkey.url), valkey, cards.env | settings)
        started.append(node)
        node.start()
        return node

    yield start
    for node in started:
        node.close()


def spec(cards: FakeCards, replica_id: str, wanted: WantedState = WantedState.RUN) -> ReplicaSpec:
    return make_spec(
        replica_id,
        wanted=wanted,
        accelerator_uuids=(cards.uuids[0],),
        memory_bytes=NEEDED_MIB << 20,
        engine_options={"cards": str(cards.folder), "vram_mib": NEEDED_MIB},
    )


def waiting(node: Node, replica_id: str, what: str) -> MemoryWait:
    def found() -> MemoryWait | None:
        replica = node.replica(replica_id)
        return replica.memory_wait if replica is not None else None

    return wait_for(found, what, seconds=40)


def exchanged(node: Node, cards: FakeCards) -> None:
    """One replica makes way for another on the same card, as a rollout without room has it."""
    node.wish(spec(cards, "old"))
    node.wait_state("old", ObservedState.READY, seconds=40)
    node.wish(spec(cards, "old", WantedState.STOP))
    node.wait_state("old", ObservedState.STOPPED, seconds=40)
    node.wish(spec(cards, "new"))


def test_successor_waits_until_the_driver_gave_the_memory_back(
    agent: Callable[..., Node], cards: FakeCards
) -> None:
    node = agent(EXAOPS_AGENT_MEMORY_WAIT_SECONDS="120")
    exchanged(node, cards)
    wait = waiting(node, "new", "the wait is reported")
    assert (wait.place, wait.needed_bytes) == (cards.uuids[0], NEEDED_MIB << 20)
    assert (wait.total_bytes, wait.free_bytes) == (TOTAL_MIB << 20, (TOTAL_MIB - NEEDED_MIB) << 20)
    assert [holder.kind for holder in wait.holders] == ["unnamed"]
    assert cards.give_back() == 1
    ready = node.wait_state("new", ObservedState.READY, seconds=40)
    assert (ready.attempt, ready.restarts, ready.memory_wait) == (1, 0, None)
    assert ready.last_exit is None


def test_without_the_wait_the_same_exchange_burns_attempts(
    agent: Callable[..., Node], cards: FakeCards
) -> None:
    node = agent(EXAOPS_AGENT_MEMORY_WAIT_SECONDS="0")
    exchanged(node, cards)

    def burnt() -> ReplicaObserved | None:
        replica = node.replica("new")
        return replica if replica is not None and replica.last_exit is not None else None

    failed = wait_for(burnt, "an attempt that ran out of memory", seconds=40)
    assert failed.last_exit is not None
    assert any("out of memory" in line for line in failed.last_exit.log_tail)


def test_stranger_on_the_card_is_named_and_the_launch_follows_when_it_leaves(
    agent: Callable[..., Node], cards: FakeCards
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as stranger:
        cards.take(cards.uuids[0], stranger.pid, 50 * 1024)
        node = agent(EXAOPS_AGENT_MEMORY_WAIT_SECONDS="1")
        node.wish(spec(cards, "new"))
        wait = waiting(node, "new", "the stranger is reported")
        assert [(h.kind, h.pid, h.memory_bytes) for h in wait.holders] == [
            ("stranger", stranger.pid, 50 << 30)
        ]
        assert wait.at_most_seconds is None
        replica = node.replica("new")
        assert replica is not None
        assert (replica.state, replica.held_by_pids) == (ObservedState.WAITING, (stranger.pid,))
        cards.free(cards.uuids[0], stranger.pid)
        ready = node.wait_state("new", ObservedState.READY, seconds=40)
        assert (ready.attempt, ready.restarts, ready.held_by_pids) == (1, 0, ())
        stranger.communicate("\n")
