"""A rollout has the conversations of replicas leave before it lets them go."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import FailureDomain, Node
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.routing.selectors import routes
from exaserve_ops.serving.domain.departure import Departure, read_departure
from exaserve_ops.serving.domain.engine_launch import TORCH
from exaserve_ops.serving.models import Deployment, Model, Release, Replica
from exaserve_ops.sessions.domain.relocation import RECOMPUTE, TRANSFER, Budget
from exaserve_ops.sessions.domain.relocation_plan import plan_relocations
from exaserve_ops.sessions.models import InferenceSession
from exaserve_ops.sessions.selectors.moves import departures, movable_fleet
from exaserve_ops.sessions.services.departures import ask_departure, withdraw_departure
from tests.fakes.fleet import make_deployment

pytestmark = pytest.mark.django_db


@pytest.fixture
def deployment() -> Deployment:
    made = make_deployment(replicas=3)
    made.releases.update(engine=TORCH)
    return made


@pytest.fixture
def replicas(deployment: Deployment) -> list[Replica]:
    """Two of the old weights and two of the new, all ready."""
    domain = FailureDomain.objects.create(name="k")
    old = deployment.releases.get()
    weights = Model.objects.create(name="next", digest="sha256:1", source="file:///next")
    new = Release.objects.create(
        deployment=deployment, number=2, model=weights, engine=TORCH, replica_memory_bytes=1
    )
    node = Node.objects.create(name="n", liveness="alive", boot_id="b", failure_domain=domain)
    return [
        Replica.objects.create(
            name=f"r{n}", deployment=deployment, node=node, memory_bytes=1, status="ready",
            reach="reached", address=f"127.0.0.1:{9000 + n}", attempt=1, release=new if n > 1 else old,
        )
        for n in range(4)
    ]  # fmt: skip


def converse(replica: Replica, *names: str) -> None:
    now = clock.now()
    for name in names:
        InferenceSession.objects.create(
            session_id=name, model_name="tiny", replica=replica, context_tokens=640, first_turn_at=now,
            last_turn_at=now - timedelta(seconds=10),
        )  # fmt: skip


def ask(replicas: list[Replica], **wish: Any) -> list[UUID]:
    departure = Departure("rollout 3 to new weights", **wish)
    ids = [replica.pk for replica in replicas]
    return ask_departure(ids, departure, actor="controller:rollouts", now=clock.now())


def plan() -> Any:
    fleet = movable_fleet(now=clock.now(), rooms=lambda _: {})
    return plan_relocations(fleet, Budget(moves_per_node=99))


def test_sessions_move_only_to_the_named_replicas_and_are_computed_again(replicas: list[Replica]) -> None:
    old, other, new, newer = replicas
    converse(old, "a", "b")
    converse(other, "c")
    assert ask([old], targets=(str(new.pk), str(newer.pk))) == [old.pk]
    moves = plan().moves
    assert {move.source_id for move in moves} == {str(old.pk)}
    assert {move.target_id for move in moves} == {str(new.pk), str(newer.pk)}
    assert {(move.estimate.way, move.why) for move in moves} == {(RECOMPUTE, "rollout 3 to new weights")}
    told = departures([old.pk, other.pk], now=clock.now())
    assert (told[old.pk].sessions_left, told[old.pk].is_over) == (2, False)
    assert (told[old.pk].moves_underway, told[old.pk].replica_status) == (0, "ready")


def test_kv_goes_along_where_the_weights_are_the_same(replicas: list[Replica]) -> None:
    old, other, *_ = replicas
    converse(old, "a")
    ask([old], targets=(str(other.pk),))
    [move] = plan().moves
    assert move.estimate.way == TRANSFER


def test_sessions_that_may_end_stay_and_the_replica_gets_no_new_ones(replicas: list[Replica]) -> None:
    old, other, *_ = replicas
    converse(old, "a")
    converse(other, "b")
    ask([old], moves=False)
    assert plan().moves == ()
    assert [record.is_left for record in routes().values()] == [pk == str(old.pk) for pk in routes()]
    Node.objects.update(drain_status="draining")
    assert {stay.why for stay in plan().stays} == {
        "no other replica of its deployment takes conversations now"
    }
    assert all(record.is_left for record in routes().values()), "their node is drained"


def test_departure_with_nowhere_to_go_says_so(replicas: list[Replica]) -> None:
    old, _, new, _ = replicas
    converse(old, "a")
    ask([old], targets=(str(new.pk),))
    Replica.objects.filter(pk=new.pk).update(status="loading")
    assert [stay.why for stay in plan().stays] == [
        "none of the replicas it may go to takes conversations now"
    ]


def test_rollout_that_turns_back_keeps_the_sessions(replicas: list[Replica]) -> None:
    old, *_ = replicas
    converse(old, "a")
    ask([old])
    ask([old])
    assert len(plan().moves) == 1
    for _ in range(2):
        withdraw_departure([old.pk], reason="rolled back", actor="controller:rollouts", now=clock.now())
    assert plan().moves == ()
    assert not any(record.is_left for record in routes().values())
    told = Event.objects.filter(subject_id=str(old.pk)).order_by("pk").values_list("event", "reason")
    assert list(told) == [
        ("departure_asked", "rollout 3 to new weights"),
        ("departure_withdrawn", "rolled back"),
    ], "the same wish again is no news"


def test_a_replica_cannot_be_left_for_itself_and_one_that_goes_is_left_out(replicas: list[Replica]) -> None:
    old, other, *_ = replicas
    with pytest.raises(ConflictError, match="both left and moved to"):
        ask([old, other], targets=(str(other.pk),))
    Replica.objects.filter(pk=other.pk).update(wanted="drain", status="draining")
    assert ask([old, other]) == [old.pk]


def test_what_the_record_keeps_of_a_departure_reads_back() -> None:
    departure = Departure("why", ("a", "b"), moves=False)
    assert read_departure(departure.to_json()) == departure
    assert read_departure({}) is None
