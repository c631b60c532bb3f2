"""Moves of conversations between engines that are not ours: by connector, by computing, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from exaserve_ops.audit.models import Event
from exaserve_ops.serving.models import Release, Replica
from exaserve_ops.sessions.domain.moves import Pin
from tests.fakes.moving_world import MovingWorld, moving_world
from workers.protocol import v1

pytestmark = pytest.mark.django_db

NIXL = {"kv_connector": "NixlConnector"}


@pytest.fixture
def world(redis_client: redis.Redis) -> Iterator[MovingWorld]:
    with moving_world(redis_client) as made:
        yield made


@pytest.mark.parametrize(
    ("engine", "options", "way"),
    [("vllm", NIXL, "transfer"), ("vllm", {}, "prefill"), ("sglang", {}, "prefill")],
)
def test_engines_that_are_not_ours_move_sessions_as_they_can(
    world: MovingWorld, engine: str, options: dict[str, str], way: str
) -> None:
    Release.objects.update(engine=engine, engine_options=options)
    order = world.begin()
    assert (world.row().way, world.row().status) == (way, "sending")
    assert order.way == ("warm_prefill" if way == "prefill" else "")
    world.answer(order, carrier="nixl" if way == "transfer" else "computed")
    world.moves.step()
    row = world.row()
    assert (row.status, row.way, row.carrier) == ("done", way, "nixl" if way == "transfer" else "computed")
    assert world.pin() == Pin(str(world.target.pk), 2, 1)


def test_engines_that_keep_no_prefixes_have_their_next_turn_computed(world: MovingWorld) -> None:
    Release.objects.update(engine="vllm", engine_options={"enable_prefix_caching": False})
    world.ask()
    world.moves.step()
    assert (world.row().status, world.row().way) == ("done", "recompute")
    assert world.told(v1.MoveSession) == []


def test_kv_of_another_shape_is_not_asked_for_and_the_target_computes(world: MovingWorld) -> None:
    Release.objects.update(engine="vllm", engine_options=NIXL)
    other = Release.objects.get(pk=world.target.release_id)
    other.pk, other.number, other.engine_options = None, other.number + 1, {**NIXL, "block_size": 64}
    other.save()
    Replica.objects.filter(pk=world.target.pk).update(release=other)
    assert world.begin().way == "warm_prefill"


def test_what_a_target_computed_is_recorded_as_that_whatever_was_planned(world: MovingWorld) -> None:
    Release.objects.update(engine="vllm", engine_options=NIXL)
    why = "its KV did not come: The engine answered 500"
    world.answer(world.begin(), carrier="computed", sent_bytes=0, target_tokens=480, reason=why)
    row = world.row()
    assert (row.way, row.sent_bytes) == ("prefill", 0)
    assert row.reason == f"480 tokens were computed there: {why}"


def test_context_that_could_not_be_computed_before_is_at_the_next_turn(world: MovingWorld) -> None:
    Release.objects.update(engine="vllm", engine_options={})
    order = world.begin()
    world.answer(order, code="busy", reason="The engine is busy.", sent_bytes=0, target_tokens=0)
    world.moves.step()
    row = world.row()
    assert (row.status, row.way) == ("done", "recompute")
    events = Event.objects.filter(event="move_skip_sending")
    assert "the target could not compute it before: busy: The engine is busy." in events.get().reason


def test_export_that_fails_leaves_the_session_at_its_source(world: MovingWorld) -> None:
    Release.objects.update(engine="vllm", engine_options=NIXL)
    world.answer(world.begin(), code="engine_refused", reason="The engine answered 500")
    world.moves.step()
    assert (world.row().status, world.row().way) == ("failed", "transfer")
    assert world.pin() == Pin(str(world.source.pk), 1, 1)
