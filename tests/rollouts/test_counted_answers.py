"""What gateways report of requests is counted for the release that answered, and durations by kind."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from exaserve_ops.rollouts.domain.policy import RolloutPolicy
from exaserve_ops.rollouts.models import Rollout
from exaserve_ops.rollouts.selectors import answers_of
from exaserve_ops.rollouts.services.answers import count_answers
from exaserve_ops.routing.domain.records import TurnRecord
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.releases import ReleaseWish, find_or_create_release
from exaserve_ops.serving.services.replicas import create_replicas
from exaserve_ops.sessions.services import PositionedTurn, record_turns
from tests.fakes.fleet import NOW, make_deployment

pytestmark = pytest.mark.django_db


@pytest.fixture
def replica() -> Replica:
    """Of the new release of a deployment that rolls; warm for long."""
    deployment = make_deployment(replicas=1)
    [made] = create_replicas(deployment.pk, 1, why="test", actor="test", now=NOW)
    old = deployment.releases.get(number=1)
    new = find_or_create_release(
        deployment.pk, ReleaseWish(engine_options={"max_num_seqs": 2}), actor="test", now=NOW
    )
    Rollout.objects.create(
        deployment=deployment,
        from_release=old,
        to_release=new,
        policy=RolloutPolicy().to_json(),
        surge=1,
        unavailable=1,
        status="running",
        created_at=NOW,
        status_changed_at=NOW,
    )
    Replica.objects.filter(pk=made.pk).update(release=new, ready_at=NOW - timedelta(hours=1))
    made.refresh_from_db()
    return made


class Turns:
    """Turns of one replica, each at a place of its own in the stream."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._positions = 0

    def count(self, *several: dict[str, Any]) -> None:
        count_answers([self.positioned(changes) for changes in several])

    def positioned(self, changes: dict[str, Any]) -> PositionedTurn:
        self._positions += 1
        fields: dict[str, Any] = {
            "request_id": "r",
            "session_id": "s",
            "model": "chat",
            "replica_id": str(self._replica.pk),
            "node_id": "",
            "key_id": "k",
            "path": "/v1/chat/completions",
            "started_at_seconds": NOW.timestamp(),
            "duration_seconds": 1.3,
            "ttft_seconds": 0.3,
            "outcome": "ok",
            "status": 200,
            "why": "sticky",
            "prompt_tokens": 500,
            "cached_tokens": 480,
            "completion_tokens": 11,
            "streamed_events": 13,
        }
        return PositionedTurn(f"{self._positions}-0", TurnRecord(**(fields | changes)))


@pytest.fixture
def turns(replica: Replica) -> Turns:
    return Turns(replica)


def told(replica: Replica) -> tuple[int, int, dict[str, int], int]:
    """Requests, failed ones, durations by kind, and how many had times between tokens."""
    found = answers_of(Rollout.objects.get(), since=NOW - timedelta(hours=1))[replica.release_id]
    kinds = {kind: sum(buckets.values()) for kind, buckets in found.ttft.items()}
    return found.requests, found.failed, kinds, sum(found.itl.values())


def test_durations_are_kept_by_what_was_computed_and_how_it_was_answered(
    replica: Replica, turns: Turns
) -> None:
    turns.count({}, {"cached_tokens": 0}, {"streamed_events": 0}, {"cached_tokens": None})
    assert told(replica) == (
        4,
        0,
        {"stream:64": 1, "stream:1024": 1, "whole:64": 1, "stream:unknown": 1},
        3,
    )


def test_conversation_that_arrives_from_elsewhere_is_a_kind_of_its_own_where_nothing_else_is_known(
    replica: Replica, turns: Turns
) -> None:
    [other] = create_replicas(replica.deployment_id, 1, why="test", actor="test", now=NOW)
    unknown: dict[str, Any] = {"cached_tokens": None}
    record_turns([turns.positioned({"replica_id": str(other.pk)})])
    turns.count(unknown, unknown, {"session_id": "new"} | unknown, {"session_id": ""} | unknown)
    assert told(replica)[2] == {"stream:arrived": 1, "stream:unknown": 3}


def test_slots_add_up(replica: Replica, turns: Turns) -> None:
    turns.count({}, {"started_at_seconds": NOW.timestamp() + 60})
    turns.count({"started_at_seconds": NOW.timestamp() + 60})
    assert told(replica) == (3, 0, {"stream:64": 3}, 3)


def test_durations_of_a_replica_that_is_not_warm_yet_are_left_out(replica: Replica, turns: Turns) -> None:
    Replica.objects.filter(pk=replica.pk).update(ready_at=NOW)
    later = NOW.timestamp() + RolloutPolicy().warm_up_seconds
    turns.count({"outcome": "engine_error", "status": 502}, {"started_at_seconds": later})
    assert told(replica) == (2, 1, {"stream:64": 1}, 1), "failures count from the first moment"


@pytest.mark.parametrize("changes", [{"attempts": 2}, {"continued_from": ("another",)}])
def test_time_that_another_replica_took_is_not_held_against_this_one(
    replica: Replica, turns: Turns, changes: dict[str, Any]
) -> None:
    turns.count(changes)
    assert told(replica) == (1, 0, {}, 0)


def test_turn_that_is_delivered_twice_counts_once(replica: Replica, turns: Turns) -> None:
    twice = PositionedTurn("7-0", turns.positioned({}).turn)
    count_answers([twice])
    count_answers([twice])
    assert told(replica)[0] == 1
