"""Two agents in processes of their own with the members of one replica: an agent's death ends nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.gang_nodes import GangAgents
from tests.fakes.valkey import running_valkey
from workers.agent import processes
from workers.protocol.observed import ObservedState

READY, FAILED = ObservedState.READY, ObservedState.FAILED


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[GangAgents]:
    with running_valkey(tmp_path) as valkey:
        gang = GangAgents(tmp_path, valkey, engine="simulated")
        gang.start()
        try:
            yield gang
        finally:
            gang.close()


def kill_agents(gang: GangAgents, *, engine: int | None = None) -> None:
    """SIGKILL for both agents, and for a member's engine before the agents come back."""
    for agent in gang.agents:
        agent.signal(signal.SIGKILL)
    if engine is not None:
        pid = gang.seen(engine).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    for agent in gang.agents:
        agent.forget_reports()
        agent.start()


def test_agents_that_die_and_come_back_keep_their_members_and_begin_no_start_twice(gang: GangAgents) -> None:
    gang.begin_start()
    gang.wait_states(READY, READY)
    before = [(gang.seen(n).pid, gang.seen(n).attempt) for n in (0, 1)]
    kill_agents(gang)
    gang.wait_states(READY, READY)
    assert [(gang.seen(n).pid, gang.seen(n).attempt) for n in (0, 1)] == before

    # An engine dies while nobody looks: that start is over, for the other member as well.
    kill_agents(gang, engine=1)
    gang.wait_states(FAILED, FAILED)
    assert [gang.seen(n).attempt for n in (0, 1)] == [1, 1]
    assert not [p for agent in gang.agents for p in processes.labelled(agent.node_id)]
    gang.begin_start()
    gang.wait_states(READY, READY)
    assert [gang.seen(n).attempt for n in (0, 1)] == [2, 2]


def test_an_agent_that_was_away_gives_way_to_the_next_start_before_it_joins_in(gang: GangAgents) -> None:
    gang.begin_start()
    gang.wait_states(READY, READY)
    earlier = gang.seen(1).pid
    away = gang.agents[1]
    away.signal(signal.SIGKILL)
    away.forget_reports()
    gang.begin_start()
    gang.wait(lambda: gang.seen(0).epoch == 2 and gang.seen(0).rendezvous, "the head begins start 2")
    away.start()
    gang.wait_states(READY, READY)
    assert earlier is not None
    assert gang.seen(1).pid != earlier
    assert {label.attempt for label in processes.labelled(away.node_id).values()} == {2}
