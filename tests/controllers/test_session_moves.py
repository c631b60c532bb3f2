"""Moves of conversations through a leading controller, the real session table and the agents' protocol."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import redis

from exaserve_ops.adapters.session_pins import RedisSessionPins
from exaserve_ops.adapters.session_table import DEFAULT_TTL_SECONDS
from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.moves import SessionMoves
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.models import Model, Release, Replica
from exaserve_ops.sessions.domain.moves import Pin, move_command
from exaserve_ops.sessions.domain.pace import MoveLimits
from exaserve_ops.sessions.domain.timeline import TurnMark
from exaserve_ops.sessions.models import InferenceSession, Relocation
from exaserve_ops.sessions.services.relocations import ask_move, delete_relocations_before
from tests.fakes.moving_world import SESSION, MovingWorld, moving_world
from tests.fakes.session_entries import age_entries
from workers.protocol import digests, v1

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(redis_client: redis.Redis) -> Iterator[MovingWorld]:
    with moving_world(redis_client) as made:
        yield made


def test_asked_move_is_sent_switched_and_the_source_freed(world: MovingWorld) -> None:
    order = world.begin()
    target_node = world.node_of(world.target)
    engine_key = digests.engine_api_key(target_node.key, str(world.target.pk), world.target.attempt)
    assert order.transfer_key == digests.transfer_key(engine_key, bytes.fromhex(order.transfer_id)).hex()
    assert (order.replica_id, order.session_id) == (str(world.source.pk), SESSION)
    assert order.target == f"http://{world.target.address}"
    assert world.row().status == "sending"
    world.answer(order)
    assert world.pin() == Pin(str(world.source.pk), 1, 1), "until the swap it is served where it was"
    world.moves.step()
    assert world.pin() == Pin(str(world.target.pk), 2, 1)
    row = world.row()
    assert (row.status, row.way, row.sent_bytes, row.target_tokens) == ("done", "transfer", 4096, 64)
    assert row.carrier == "tcp"
    world.session.refresh_from_db()
    assert (world.session.replica, world.session.replica_changes) == (world.target, 1)
    assert world.session.node_name == world.node_of(world.target).name
    [freed] = world.told(v1.LetSessionGo)
    assert (freed.replica_id, freed.session_id) == (str(world.source.pk), SESSION)
    events = Event.objects.filter(subject_kind="session").order_by("pk").values_list("event", flat=True)
    assert list(events) == ["move_asked", "move_send", "move_arrived", "move_repinned"]


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"turn_began": True}, "dropped"),
        ({"code": "turn_runs"}, "dropped"),
        ({"code": "target_unreachable", "reason": "refused"}, "failed"),
        ({"code": "no_room"}, "failed"),
    ],
)
def test_move_that_was_not_whole_leaves_the_session_where_it_is(
    world: MovingWorld, facts: dict[str, Any], status: str
) -> None:
    world.answer(world.begin(), **facts)
    world.moves.step()
    assert world.row().status == status
    assert world.row().ended_at is not None
    assert world.pin() == Pin(str(world.source.pk), 1, 1)
    assert world.told(v1.LetSessionGo) == []


@pytest.mark.parametrize("code", ["session_unknown", "other_shape", "status_404"])
def test_session_without_kv_to_send_moves_without_it(world: MovingWorld, code: str) -> None:
    world.answer(world.begin(), code=code, target_tokens=0, sent_bytes=0)
    world.moves.step()
    assert (world.row().status, world.row().way) == ("done", "recompute")
    assert world.pin() == Pin(str(world.target.pk), 2, 1)


def test_turn_between_arrival_and_swap_drops_the_move(world: MovingWorld) -> None:
    world.answer(world.begin())
    world.claim()
    world.moves.step()
    assert world.row().status == "dropped"
    assert world.pin() == Pin(str(world.source.pk), 1, 2)


class LatePins(RedisSessionPins):
    """A session table where a turn begins right after each look."""

    def find(self, model: str, session_id: str, replica_ids: Sequence[str], /) -> Pin | None:
        found = super().find(model, session_id, replica_ids)
        self._ask(lambda: self._table.claimed(model, session_id, replica_ids[0]))
        return found


def test_turn_that_begins_as_the_swap_is_made_goes_to_the_source_and_drops_the_move(
    world: MovingWorld,
) -> None:
    world.answer(world.begin())
    pins = LatePins(os.environ["REDIS_URL"], ttl_seconds=DEFAULT_TTL_SECONDS)
    try:
        SessionMoves(world.leader.state, world.leader.reconcilers._link, pins).step()
    finally:
        pins.close()
    assert (world.row().status, world.row().reason) == ("dropped", "a turn or a gateway came between")
    assert world.pin() == Pin(str(world.source.pk), 1, 2)
    assert world.told(v1.LetSessionGo) == []


def test_agent_that_refuses_or_another_node_that_answers_moves_nothing(world: MovingWorld) -> None:
    order = world.begin()
    stranger = world.node_of(world.target)
    stranger._send(v1.SessionSent(node_id=stranger.node_id, command_id=order.command_id, target_tokens=64))
    world.leader.ingest.step()
    assert world.row().status == "sending"
    node = world.node_of(world.source)
    node._send(
        v1.CommandResult(
            node_id=node.node_id, command_id=order.command_id, outcome="refused", reason="does not run here"
        )
    )
    world.leader.ingest.step()
    assert (world.row().status, world.row().reason) == ("dropped", "refused: does not run here")
    assert world.pin() == Pin(str(world.source.pk), 1, 1)


def test_answer_for_a_move_that_nobody_knows_or_that_has_ended_changes_nothing(world: MovingWorld) -> None:
    order = world.begin()
    world.answer(order, code="no_room")
    world.answer(order)
    assert world.row().status == "failed"
    node = world.node_of(world.source)
    node._send(v1.SessionSent(node_id=node.node_id, command_id=move_command(str(uuid4()))))
    world.leader.ingest.step()
    assert Relocation.objects.count() == 1


def test_next_leader_ends_what_nobody_answers(world: MovingWorld) -> None:
    world.begin()
    world.lead_anew().step()
    assert world.row().status == "sending", "there is time left"
    world.lead_anew(send_seconds=0, answer_seconds=-1).step()
    assert (world.row().status, world.row().reason) == ("dropped", "it was sending for too long")
    assert world.pin() == Pin(str(world.source.pk), 1, 1)


def test_next_leader_begins_what_was_only_planned_and_records_a_swap_that_was_made(
    world: MovingWorld,
) -> None:
    world.ask()
    world.lead_anew().step()
    [order] = world.told(v1.MoveSession)
    world.answer(order)
    world.pins.repin("tiny", SESSION, str(world.target.pk), 1)  # and then the leader died
    world.lead_anew().step()
    assert world.row().status == "done"
    assert world.pin() == Pin(str(world.target.pk), 2, 1)


def test_target_that_goes_before_the_swap_gets_nothing(world: MovingWorld) -> None:
    world.answer(world.begin())
    Node.objects.filter(pk=world.target.node_id).update(liveness="dead")
    world.moves.step()
    assert world.row().status == "dropped"
    assert world.pin() == Pin(str(world.source.pk), 1, 1)


def test_session_that_a_gateway_has_moved_is_left_there(world: MovingWorld) -> None:
    world.ask()
    world.pins.repin("tiny", SESSION, str(world.target.pk), 1)
    world.moves.step()
    assert world.row().status == "dropped"
    assert world.told(v1.MoveSession) == []


def test_drained_node_hands_its_sessions_to_another_replica(world: MovingWorld) -> None:
    Node.objects.filter(pk=world.source.node_id).update(drain_status="draining")
    world.moves.step()
    [order] = world.told(v1.MoveSession)
    assert order.target == f"http://{world.target.address}"
    row = world.row()
    assert (row.target, row.asked_by) == (world.target, "")
    assert row.why == f"node {world.node_of(world.source).name} is drained"
    world.answer(order, code="target_unreachable")
    world.moves.step()
    assert Relocation.objects.count() == 1, "not again at once"
    Relocation.objects.update(ended_at=clock.now() - timedelta(minutes=1))
    world.moves.step()
    assert Relocation.objects.count() == 2


@pytest.mark.parametrize(("seconds", "way"), [(0.001, "transfer"), (100.0, "recompute")])
def test_kv_goes_along_only_where_that_is_faster_than_computing_it(
    world: MovingWorld, seconds: float, way: str
) -> None:
    now = clock.now()
    mark = TurnMark(now.timestamp(), 1.0, 0.5, str(world.source.pk), "new", "ok", 640, 0, 8)
    InferenceSession.objects.update(latest_turns=[list(mark)] * 5, context_tokens=640)
    Model.objects.update(kv_bytes_per_token=1024)
    talk = [(62, 100.0)] * 3  # without a block, which says nothing of how fast blocks go
    for sent_bytes, took_seconds in [(1 << 20, seconds)] * 3 + talk:
        Relocation.objects.create(
            session=world.session, source=world.source, target=world.target, status="done", why="x",
            sent_bytes=sent_bytes, send_seconds=took_seconds, created_at=now, status_changed_at=now,
            ended_at=now,
        )  # fmt: skip
    world.ask()
    world.moves.step()
    row = world.row()
    assert (row.way, row.status) == (way, "sending" if way == "transfer" else "done")


def test_turn_that_runs_is_waited_for(world: MovingWorld) -> None:
    world.claim()
    InferenceSession.objects.update(last_turn_at=clock.now() - timedelta(seconds=30))
    Node.objects.filter(pk=world.source.node_id).update(drain_status="draining")
    world.moves.step()
    assert not Relocation.objects.exists(), "nothing is begun that would only be dropped"
    row = world.ask()
    world.moves.step()
    row.refresh_from_db()
    assert (row.status, row.reason) == ("planned", "a turn runs; it moves when that has ended")
    InferenceSession.objects.update(last_turn_at=clock.now())
    world.moves.step()
    assert world.row().status == "sending"


def test_moves_without_kv_do_not_wait_for_one_another(world: MovingWorld) -> None:
    Release.objects.update(engine="simulated")
    now = clock.now()
    for number in range(6):
        name = f"talk-{number}"
        InferenceSession.objects.create(
            session_id=name, model_name="tiny", replica=world.source, context_tokens=64, first_turn_at=now,
            last_turn_at=now,
        )  # fmt: skip
        world.pins._ask(lambda name=name: world.pins._table.claimed("tiny", name, str(world.source.pk)))  # type: ignore[misc]  # a default binds it
    age_entries(world.nodes[next(iter(world.nodes))].client, 60)
    Node.objects.filter(pk=world.source.node_id).update(drain_status="draining")
    world.moves.step()
    done = Relocation.objects.filter(status="done", way="recompute").count()
    assert done == 7, "in one step, two at a time"


def test_session_that_left_a_drained_node_is_not_moved_again(world: MovingWorld) -> None:
    Node.objects.filter(pk=world.source.node_id).update(drain_status="draining")
    world.moves.step()
    [order] = world.told(v1.MoveSession)
    world.answer(order)
    world.moves.step()
    Relocation.objects.update(ended_at=clock.now() - timedelta(minutes=1))
    world.moves.step()
    assert [row.status for row in Relocation.objects.all()] == ["done"]


def test_no_more_move_at_once_than_the_budget_has(world: MovingWorld) -> None:
    world.lead_anew(limits=MoveLimits(moves_per_fleet=0)).step()
    row = world.ask()
    world.moves.step()
    row.refresh_from_db()
    assert (row.status, row.reason) == ("planned", "0 moves are under way in the fleet, as many as may be")
    world.lead_anew(planned_seconds=-1).step()
    row.refresh_from_db()
    assert row.status == "dropped"


def test_what_cannot_move_is_refused_at_once(world: MovingWorld) -> None:
    row = world.ask()
    with pytest.raises(ConflictError, match="on its way already"):
        world.ask()
    assert delete_relocations_before(clock.now()) == 0, "it has not ended"
    Relocation.objects.filter(pk=row.pk).delete()
    fields: dict[str, Any] = {"reason": "x", "actor": "user:o", "now": clock.now()}
    with pytest.raises(ConflictError, match="there already"):
        ask_move(world.session.pk, world.source.pk, **fields)
    with pytest.raises(ConflictError, match="no such replica"):
        ask_move(world.session.pk, uuid4(), **fields)
    Replica.objects.filter(pk=world.target.pk).update(wanted="drain")
    with pytest.raises(ConflictError, match="takes no conversations now"):
        ask_move(world.session.pk, world.target.pk, **fields)
    with pytest.raises(ConflictError, match="no other replica"):
        ask_move(world.session.pk, None, **fields)
    InferenceSession.objects.update(replica=None)
    with pytest.raises(ConflictError, match="no replica on record"):
        ask_move(world.session.pk, None, **fields)


def test_session_table_that_is_away_leaves_a_move_for_later(world: MovingWorld) -> None:
    world.answer(world.begin())
    away = RedisSessionPins("unix:///nowhere/redis.sock", ttl_seconds=DEFAULT_TTL_SECONDS)
    try:
        with pytest.raises(ConnectionError):
            SessionMoves(world.leader.state, world.leader.reconcilers._link, away).step()
    finally:
        away.close()
    assert world.row().status == "switching"
    world.moves.step()
    assert world.row().status == "done"


def test_target_has_what_a_source_sent_that_died_before_the_swap(world: MovingWorld) -> None:
    world.answer(world.begin())
    world.leader.lose(str(world.source.node_id))
    world.lead_anew().step()
    assert world.row().status == "done"
    assert world.pin() == Pin(str(world.target.pk), 2, 1)


def test_source_that_died_before_it_was_asked_is_not_asked_and_the_target_computes_anew(
    world: MovingWorld,
) -> None:
    world.ask()
    world.leader.lose(str(world.source.node_id))
    for _ in range(2):
        world.lead_anew().step()
    assert (world.row().status, world.row().way) == ("done", "recompute")
    assert world.told(v1.MoveSession) == []


def test_session_table_that_has_lost_everything_ends_the_move_and_the_next_turn_makes_a_new_entry(
    world: MovingWorld, redis_client: redis.Redis
) -> None:
    world.answer(world.begin())
    for key in redis_client.scan_iter("exaops:s:*"):
        redis_client.delete(key)
    world.moves.step()
    assert (world.row().status, world.row().reason) == ("dropped", "the session table has forgotten it")
    world.claim()
    assert world.pin() == Pin(str(world.source.pk), 1, 1)


def test_session_table_that_is_away_leaves_what_is_planned_for_later(world: MovingWorld) -> None:
    world.ask()
    away = RedisSessionPins("unix:///nowhere/redis.sock")
    try:
        with pytest.raises(ConnectionError):
            SessionMoves(world.leader.state, world.leader.reconcilers._link, away).step()
    finally:
        away.close()
    assert (world.row().status, world.told(v1.MoveSession)) == ("planned", [])
    world.moves.step()
    assert world.row().status == "sending"


def test_leader_that_dies_before_its_order_went_out_leaves_a_move_that_ends_by_its_time(
    world: MovingWorld,
) -> None:
    class MuteLink:
        """Dies instead of sending."""

        def move_session(self, *_: Any, **__: Any) -> None:
            raise SystemExit

    world.ask()
    with pytest.raises(SystemExit):
        SessionMoves(world.leader.state, MuteLink(), world.pins).step()  # type: ignore[arg-type]  # one call
    assert world.row().status == "sending"
    world.lead_anew(send_seconds=0, answer_seconds=-1).step()
    assert world.row().status == "dropped"
    assert world.pin() == Pin(str(world.source.pk), 1, 1)


def test_leader_that_dies_after_the_swap_lets_the_next_one_tell_the_source(world: MovingWorld) -> None:
    class ForgetfulPins(RedisSessionPins):
        """The leader dies as the table has swapped."""

        def repin(self, *asked: Any) -> Pin:
            super().repin(*asked)
            raise SystemExit

    world.answer(world.begin())
    pins = ForgetfulPins(os.environ["REDIS_URL"])
    try:
        with pytest.raises(SystemExit):
            SessionMoves(world.leader.state, world.leader.reconcilers._link, pins).step()
    finally:
        pins.close()
    assert (world.row().status, world.told(v1.LetSessionGo)) == ("switching", [])
    world.claim()  # a turn at its new place
    world.lead_anew().step()
    assert world.row().status == "done"
    assert len(world.told(v1.LetSessionGo)) == 1
