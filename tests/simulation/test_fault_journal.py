"""What faults did is written down; more can be asked for meanwhile; a dead machine may be mute."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.simulation import Conversation
from tests.simulation.test_simulated_serving import Serving
from workers.simulation import faults
from workers.simulation.journal import FaultInbox, FaultJournal, FaultNote, read_journal
from workers.simulation.serve import EngineServer


def test_fault_is_noted_when_it_takes_effect_and_when_it_ends() -> None:
    talk = Conversation(
        nodes=2, faults=(faults.NodeDeath(at_seconds=5, for_seconds=3, nodes=("sim-r01-n000",)),)
    )
    began = talk.now
    notes: list[FaultNote] = []
    for _ in range(40):
        talk.pass_time(0.25)
        notes += talk.fleet.take_notes()
    assert [(note.kind, note.phase, note.node) for note in notes] == [
        ("node-death", "begin", "sim-r01-n000"),
        ("node-death", "end", "sim-r01-n000"),
    ]
    assert [note.monotonic_seconds - began for note in notes] == pytest.approx([5, 8], abs=0.25)
    assert notes[0].unix_seconds > notes[0].monotonic_seconds


def test_flapping_is_noted_at_each_turn() -> None:
    talk = Conversation(faults=(faults.Flapping(at_seconds=1, down_seconds=2, up_seconds=2),))
    talk.pass_time(8)
    assert [note.phase for note in talk.fleet.take_notes()] == ["begin", "end", "begin", "end"]


def test_fault_that_is_added_later_counts_from_then() -> None:
    talk = Conversation(nodes=2)
    talk.pass_time(20)
    talk.fleet.add_fault(faults.parse_fault("node-death@1s+2s:nodes=sim-r02-n001"), talk.now)
    talk.pass_time(2)
    assert not talk.fleet.is_reached(talk.identities[1].node_id)
    talk.pass_time(2)
    assert talk.fleet.is_reached(talk.identities[1].node_id)


def test_added_fault_without_a_target_is_chosen_alike_by_every_process() -> None:
    chosen = []
    for _ in range(2):
        talk = Conversation(nodes=50, seed=3)
        talk.fleet.add_fault(faults.parse_fault("node-death@0s:share=0.1"), talk.now)
        talk.pass_time(1)
        chosen.append({note.node for note in talk.fleet.take_notes()})
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 5


def test_inbox_gives_each_whole_line_once_and_leaves_out_what_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "inbox"
    path.write_text("node-death@1s\n")
    inbox = FaultInbox(path)
    assert inbox.take() == []  # from before it was opened
    with path.open("a") as file:
        file.write("jitter@0s+5s:jitter_ratio=0.9\nnonsense\n\nnode-de")
    assert inbox.take() == [faults.Jitter(at_seconds=0, for_seconds=5, jitter_ratio=0.9)]
    assert inbox.take() == []
    with path.open("a") as file:
        file.write("ath@2s:manner=mute\n")
    assert inbox.take() == [faults.NodeDeath(at_seconds=2, manner="mute")]


def test_inbox_that_nobody_made_is_empty(tmp_path: Path) -> None:
    assert FaultInbox(tmp_path / "none").take() == []


def test_journal_is_read_back_without_a_line_that_is_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    note = FaultNote(
        kind="node-death", phase="begin", node="n", node_id="i", monotonic_seconds=1.5, unix_seconds=2.5
    )
    FaultJournal(path).write([note, note])
    with path.open("a") as file:
        file.write('{"kind": "node')
    assert read_journal(path) == [note, note]


def test_manner_of_a_death_is_checked() -> None:
    with pytest.raises(faults.FaultScriptError, match="manner"):
        faults.parse_fault("node-death@0s:manner=loud")


@pytest.fixture
def mute() -> Iterator[Serving]:
    """Two nodes, the first of which is about to go without a word."""
    serving = Serving()
    serving.server = EngineServer(serving.talk.fleet, threading.Lock(), [serving.port])
    serving.server.start()
    yield serving
    serving.server.stop()


def die(serving: Serving, manner: str) -> None:
    talk = serving.talk
    talk.pass_time(max(0.0, time.monotonic() - talk.now))
    talk.fleet.add_fault(
        faults.parse_fault(f"node-death@0s:nodes={talk.identities[0].name},manner={manner}"), talk.now
    )
    talk.pass_time(0.1)


def test_mute_machine_takes_connections_and_answers_none(mute: Serving) -> None:
    die(mute, "mute")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(mute.url(0) + "/v1/chat/completions", json={}, timeout=0.3)
    assert mute.ask(1).status_code == 200


def test_machine_that_refuses_breaks_connections_at_once(mute: Serving) -> None:
    die(mute, "refused")
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
        httpx.post(mute.url(0) + "/v1/chat/completions", json={}, timeout=5)


def test_open_answer_of_a_mute_machine_stops_without_an_end(mute: Serving) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2000, "stream": True}
    headers = {"Authorization": f"Bearer {mute.token(0)}"}
    url = mute.url(0) + "/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=0.5) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        die(mute, "mute")
        with pytest.raises(httpx.ReadTimeout):
            for _ in pieces:
                pass
