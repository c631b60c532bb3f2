"""Finished requests become sessions, once each, however often they are delivered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.inventory.models import FailureDomain, Node
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.routing.domain.records import TurnRecord
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import create_replicas
from exaserve_ops.sessions.domain.timeline import LATEST_STAYS, LATEST_TURNS, read_stays, read_turns
from exaserve_ops.sessions.models import InferenceSession
from exaserve_ops.sessions.selectors import count_moved_sessions, replicas_of_timeline
from exaserve_ops.sessions.services import PositionedTurn, record_turns
from tests.fakes.fleet import NOW, make_deployment
from workers.engines.demo_model import make_demo_model

pytestmark = pytest.mark.django_db


def turn(session: str, replica: str = "", *, outcome: str = "ok", tokens: int = 10) -> TurnRecord:
    return TurnRecord(
        request_id="r",
        session_id=session,
        model="chat",
        replica_id=replica,
        node_id="",
        key_id="k",
        path="/v1/chat/completions",
        started_at_seconds=NOW.timestamp(),
        duration_seconds=1.0,
        ttft_seconds=0.25,
        outcome=outcome,
        status=200,
        why="sticky",
        prompt_tokens=tokens,
        cached_tokens=tokens // 2,
        completion_tokens=tokens,
    )


def positioned(*turns: TurnRecord, start: int = 1) -> list[PositionedTurn]:
    return [PositionedTurn(f"{n}-0", t) for n, t in enumerate(turns, start)]


@pytest.fixture
def replicas() -> list[Replica]:
    deployment = make_deployment(replicas=2)
    made = create_replicas(deployment.pk, 2, why="test", actor="test", now=NOW)
    domain = FailureDomain.objects.create(kind="host", name="n")
    node = Node.objects.create(name="n", failure_domain=domain)
    Replica.objects.update(node=node)
    return made


def test_turns_add_up_in_their_session(replicas: list[Replica]) -> None:
    first, second = (str(r.pk) for r in replicas)
    batch = positioned(turn("s1", first), turn("s1", first), turn("s1", second, outcome="engine_error"))
    assert record_turns(batch) == 3
    row = InferenceSession.objects.get()
    assert (row.turns, row.failed_turns, row.replica_changes) == (3, 1, 1)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (30, 15, 30)
    assert (str(row.replica_id), row.node_name, row.context_tokens) == (second, "n", 20)


def test_continued_turn_is_on_record_with_the_replica_that_broke_off(replicas: list[Replica]) -> None:
    first, second = (str(r.pk) for r in replicas)
    continued = replace(turn("s1", second), why="continued", continued_from=(first,))
    record_turns(positioned(turn("s1", first), continued, replace(continued, session_id="s2")))
    row = InferenceSession.objects.get(session_id="s1")
    assert (row.replica_changes, row.last_why, str(row.replica_id)) == (1, "continued", second)
    assert InferenceSession.objects.get(session_id="s2").replica_changes == 1, "it began elsewhere"
    assert [mark.continued_from for mark in read_turns(row.latest_turns)] == [(), (first,)]
    assert [stay.why for stay in read_stays(row.stays)] == ["sticky", "continued"]
    assert count_moved_sessions([replicas[1].pk], since=NOW) == 2
    assert set(replicas_of_timeline(row)) == {first, second}


def test_a_batch_delivered_twice_counts_once(replicas: list[Replica]) -> None:
    batch = positioned(*(turn(f"s{n % 3}", str(replicas[0].pk)) for n in range(9)))
    assert (record_turns(batch), record_turns(batch)) == (9, 0)
    assert sum(InferenceSession.objects.values_list("turns", flat=True)) == 9


def test_positions_compare_as_numbers_not_as_text() -> None:
    assert record_turns([PositionedTurn("999-9", turn("s"))]) == 1
    assert record_turns([PositionedTurn("999-10", turn("s"))]) == 1
    assert record_turns([PositionedTurn("1000-0", turn("s"))]) == 1


def test_an_anonymous_turn_makes_no_session_and_an_unknown_replica_no_error() -> None:
    assert record_turns(positioned(turn(""))) == 0
    assert record_turns(positioned(turn("s", "00000000-0000-4000-8000-000000000000"))) == 1
    assert InferenceSession.objects.get().replica is None


def test_a_batch_costs_the_same_number_of_queries_whatever_its_size(replicas: list[Replica]) -> None:
    counts = []
    for size in (2, 200):
        with CaptureQueriesContext(
            connection,
        ) as queries:
            record_turns(positioned(*(turn(f"{size}-{n}", str(replicas[0].pk)) for n in range(size))))
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 6


def test_a_model_folder_is_read_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    make_demo_model(folder, seed=0)
    facts = ModelFolder().read(str(folder))
    assert facts.architecture.family == "llama"
    assert 1_000_000 < facts.parameter_count < 10_000_000
    for missing, word in (("tokenizer.json", "tokenizer"), ("config.json", "config.json")):
        (folder / missing).rename(folder / f".{missing}")
        with pytest.raises(InvalidInputError, match=word):
            ModelFolder().read(str(folder))
        (folder / f".{missing}").rename(folder / missing)
    with pytest.raises(InvalidInputError, match="absolute"):
        ModelFolder().read("relative/folder")
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(b"\xff" * 64)
    with pytest.raises(InvalidInputError, match="header"):
        ModelFolder().read(str(folder))


def test_course_of_a_conversation_is_kept_turn_by_turn_and_stay_by_stay(replicas: list[Replica]) -> None:
    first, second = (str(r.pk) for r in replicas)
    for start, replica in ((1, first), (2, first), (3, second), (4, first)):
        record_turns(positioned(turn("s", replica), start=start))
    row = InferenceSession.objects.get()
    assert [t.replica_id for t in read_turns(row.latest_turns)] == [first, first, second, first]
    assert [(s.replica_id, s.turns, s.node_name) for s in read_stays(row.stays)] == [
        (first, 2, "n"),
        (second, 1, "n"),
        (first, 1, "n"),
    ]
    assert set(replicas_of_timeline(row)) == {first, second}


def test_course_is_bounded_and_a_turn_that_reached_nobody_is_no_stay(replicas: list[Replica]) -> None:
    ids = [str(r.pk) for r in replicas]
    record_turns(positioned(*(turn("s", ids[n % 2]) for n in range(100))))
    record_turns(positioned(turn("s", outcome="unavailable"), start=200))
    row = InferenceSession.objects.get()
    turns, stays = read_turns(row.latest_turns), read_stays(row.stays)
    assert (len(turns), len(stays)) == (LATEST_TURNS, LATEST_STAYS)
    assert (turns[-1].replica_id, turns[-1].outcome) == ("", "unavailable")
    assert stays[-1].replica_id == ids[1]
