"""What faults look like from the control plane, in thousands of simulated seconds."""

from __future__ import annotations

import pytest

from tests.fakes.simulation import WALL_OFFSET, Conversation, gaps, spec
from workers.protocol.observed import ObservedState
from workers.simulation import faults

NAME = "sim-r01-n000"


def fleet(*script: faults.Fault, nodes: int = 1, seed: int = 7) -> Conversation:
    """Nodes that hold a lease and run one replica each."""
    talk = Conversation(nodes=nodes, faults=script, seed=seed)
    for number in range(nodes):
        talk.wish(spec(f"replica-{number}"), number=number)
    return talk


def silent(talk: Conversation) -> set[int]:
    """Numbers of the nodes of which nothing was heard for three seconds."""
    since = talk.now - 3
    return {number for number in range(talk.nodes) if not talk.beats(number, since=since)}


def test_dead_node_is_silent_and_comes_back_with_a_new_boot_and_new_attempts() -> None:
    talk = fleet(faults.NodeDeath(at_seconds=20, for_seconds=30))
    talk.pass_time(40)
    assert silent(talk) == {0}
    talk.pass_time(30)
    assert max(gaps(talk.beats())) == pytest.approx(31, abs=2)
    assert len({hello.boot_id for hello in talk.hellos()}) == 2
    assert talk.replica("replica-0").attempt == 2
    assert talk.replica("replica-0").state is ObservedState.READY


def test_partitioned_node_goes_on_serving_and_says_the_same_boot_afterwards() -> None:
    talk = fleet(faults.Partition(at_seconds=20, for_seconds=30))
    talk.pass_time(40)
    assert silent(talk) == {0}
    assert not talk.fleet.is_reached(talk.identities[0].node_id)
    talk.pass_time(30)
    assert len({hello.boot_id for hello in talk.hellos()}) == 1
    assert talk.hellos()[-1].reconnect
    seen = talk.replica("replica-0")
    assert (seen.attempt, seen.state) == (1, ObservedState.READY)
    assert seen.uptime_seconds > 60


def test_commands_do_not_reach_a_partitioned_node() -> None:
    talk = fleet(faults.Partition(at_seconds=10, for_seconds=10))
    talk.pass_time(15)
    talk.wish(revision=2)
    talk.pass_time(10)
    assert talk.replica("replica-0").state is ObservedState.READY
    talk.wish(revision=3)
    talk.pass_time(3)
    assert talk.replica("replica-0").state is ObservedState.STOPPED


def test_lost_rack_takes_all_of_its_nodes_and_no_other() -> None:
    talk = fleet(faults.RackLoss(at_seconds=10, racks=("rack-2",)), nodes=12)
    talk.pass_time(20)
    assert silent(talk) == {1, 5, 9}


def test_mass_silence_ends_as_it_began() -> None:
    talk = fleet(faults.MassSilence(at_seconds=10, for_seconds=10, share=0.75), nodes=12)
    talk.pass_time(18)
    assert len(silent(talk)) == 9
    talk.pass_time(8)
    assert silent(talk) == set()


def test_flapping_node_comes_and_goes_until_the_end() -> None:
    talk = fleet(faults.Flapping(at_seconds=10, for_seconds=100, down_seconds=6, up_seconds=4))
    talk.pass_time(200)
    long_gaps = [gap for gap in gaps(talk.beats()) if gap > 4]
    assert len(long_gaps) == 10
    assert silent(talk) == set()


def test_slow_node_reports_late_and_its_engine_is_slow() -> None:
    talk = fleet(faults.SlowNode(nodes=(NAME,), delay_seconds=0.5, latency_factor=5), nodes=2)
    talk.pass_time(300)

    def itl(number: int) -> float:
        values = [
            seen.telemetry.itl_p50_seconds or 0.0
            for _, beat in talk.beats(number)
            for seen in beat.replicas
            if seen.telemetry is not None
        ]
        return max(values)

    assert itl(0) > 3 * itl(1)
    assert len(talk.beats(0)) < len(talk.beats(1)) + 2


def test_clock_jump_moves_what_the_node_says_and_not_when_it_says_it() -> None:
    talk = fleet(faults.ClockJump(at_seconds=10, for_seconds=10, offset_seconds=-600))
    talk.pass_time(15)
    at, beat = talk.beats()[-1]
    assert beat.sent_at_seconds - (at + WALL_OFFSET) == pytest.approx(-600, abs=1)
    talk.pass_time(10)
    at, beat = talk.beats()[-1]
    assert beat.sent_at_seconds - (at + WALL_OFFSET) == pytest.approx(0, abs=1)
    assert max(gaps(talk.beats())) < 1.5


def test_lost_reports_are_about_as_many_as_the_script_says() -> None:
    talk = fleet(faults.ReportLoss(loss_ratio=0.1), nodes=4)
    talk.pass_time(1000, step_seconds=1.0)
    heard = sum(len(talk.beats(number)) for number in range(4))
    assert 0.87 * 4000 < heard < 0.93 * 4000


def test_jitter_spreads_beats_but_keeps_their_number() -> None:
    talk = fleet(faults.Jitter(jitter_ratio=0.9))
    talk.pass_time(600, step_seconds=0.05)
    beats = talk.beats()
    assert len(beats) == pytest.approx(600, rel=0.5)
    assert max(gaps(beats)) > 1.5
    assert max(gaps(beats)) < 3.0


def test_restarted_agent_keeps_its_replicas_and_names_a_new_boot() -> None:
    talk = fleet(faults.AgentRestart(at_seconds=20))
    talk.pass_time(30)
    assert len({hello.boot_id for hello in talk.hellos()}) == 2
    assert talk.replica("replica-0").attempt == 1
    assert talk.replica("replica-0").state is ObservedState.READY
    assert talk.beats()[-1][1].lease_epoch == 1


def test_equal_seeds_say_the_same_bytes_and_other_seeds_others() -> None:
    script = (
        faults.NodeDeath(at_seconds=30, for_seconds=20),
        faults.ReportLoss(loss_ratio=0.2),
        faults.ReplicaCrash(at_seconds=40, share=0.5),
    )
    runs = [fleet(*script, nodes=6, seed=seed) for seed in (3, 3, 4)]
    for talk in runs:
        talk.pass_time(200)
    assert runs[0].raw == runs[1].raw
    assert runs[0].raw != runs[2].raw


def test_overlapping_faults_hold_until_the_last_one_ends() -> None:
    talk = fleet(
        faults.Partition(at_seconds=10, for_seconds=20),
        faults.Partition(at_seconds=20, for_seconds=30),
    )
    talk.pass_time(40)
    assert silent(talk) == {0}
    talk.pass_time(20)
    assert silent(talk) == set()
