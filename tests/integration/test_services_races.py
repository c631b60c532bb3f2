"""Several writers at once leave one consistent history."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from uuid import uuid4

import pytest
from django.db import connection

from exaserve_ops.audit.models import Event
from exaserve_ops.inventory.models import JoinToken, Node
from exaserve_ops.inventory.services import create_join_token, enrol_node
from exaserve_ops.lib.errors import ConflictError, DeniedError, StaleError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.serving.domain.observed import ObservedReplica
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Deployment, Replica
from exaserve_ops.serving.services.deployments import delete_deployment, scale_deployment
from exaserve_ops.serving.services.observations import record_observations
from exaserve_ops.serving.services.replicas import (
    advance_replica,
    create_replicas,
    let_go_replica,
    place_replica,
    replace_replica,
)
from tests.fakes.race import race
from tests.fakes.world import NOW, make_deployment, make_node

pytestmark = pytest.mark.django_db(transaction=True)


def ready_replica() -> Replica:
    node = make_node("n1")
    [replica] = create_replicas(make_deployment().pk, 1, why="test", actor="test", now=NOW)
    uuid = node.accelerators.all()[0].uuid
    place_replica(replica.pk, Placement(str(node.pk), "n1", (uuid,), "test"), actor="test", now=NOW)
    return advance_replica(replica.pk, "seen_ready", reason="", actor="test", now=NOW)


def history(kind: str, subject_id: object) -> list[Event]:
    return list(Event.objects.filter(subject_kind=kind, subject_id=str(subject_id)).order_by("pk"))


def assert_one_chain(kind: str, subject_id: object, final: str) -> None:
    moves = [(e.from_status, e.to_status) for e in history(kind, subject_id) if e.to_status]
    assert all(before[1] == after[0] for before, after in pairwise(moves)), moves
    assert moves[-1][1] == final


@pytest.mark.parametrize("_attempt", range(3))
def test_three_racing_writers_never_resurrect_a_stopped_replica(_attempt: int) -> None:
    replica = ready_replica()

    def stop() -> None:
        let_go_replica(replica.pk, "stop", why="test", actor="controller", now=NOW)
        advance_replica(replica.pk, "seen_stopped", reason="gone", actor="agent", now=NOW)

    def report(state: str) -> None:
        seen = ObservedReplica(str(replica.pk), replica.generation, state, attempt=1, address="a:1")
        for _ in range(5):
            record_observations([seen], node_id=replica.node_id, actor="agent", now=NOW)  # type: ignore[arg-type]  # placed

    race(stop, partial(report, "ready"), partial(report, "backing_off"))
    replica.refresh_from_db()
    assert (replica.status, replica.wanted) == ("stopped", "stop")
    assert_one_chain("replica", replica.pk, "stopped")


def test_racing_moves_of_one_replica_happen_one_after_the_other() -> None:
    replica = ready_replica()
    events = ("drain", "stop", "seen_backing_off", "node_lost")
    race(
        *[
            partial(advance_replica, replica.pk, event, reason=event, actor="test", now=NOW)
            for event in events
        ],
        expect=(IllegalTransitionError,),
    )
    replica.refresh_from_db()
    assert_one_chain("replica", replica.pk, replica.status)


def test_replica_is_replaced_by_one_of_two_askers() -> None:
    replica = ready_replica()
    ask = partial(replace_replica, replica.pk, why="slow", actor="test", now=NOW)
    results = race(ask, ask, expect=(ConflictError,))
    assert sorted(type(result).__name__ for result in results) == ["ConflictError", "Replica"]
    replica.refresh_from_db()
    assert replica.generation == 2


def test_racing_scales_each_get_a_generation_of_their_own() -> None:
    deployment = make_deployment(replicas=0)
    wishes = range(1, 7)
    race(*[partial(scale_deployment, deployment.pk, replicas=n, actor=f"user:{n}", now=NOW) for n in wishes])
    deployment.refresh_from_db()
    scaled = [e for e in history("deployment", deployment.pk) if e.event == "scaled"]
    assert [e.generation for e in scaled] == list(range(2, 8))
    assert scaled[-1].actor == f"user:{deployment.replicas}"
    assert deployment.generation == 7


def test_of_two_changes_made_from_the_same_reading_one_is_refused() -> None:
    deployment = make_deployment(replicas=0)
    change = partial(scale_deployment, deployment.pk, actor="test", now=NOW, expected_generation=1)
    results = race(partial(change, replicas=3), partial(change, replicas=5), expect=(StaleError,))
    assert sum(isinstance(result, StaleError) for result in results) == 1
    deployment.refresh_from_db()
    assert deployment.generation == 2


def test_scale_and_delete_at_once_leave_a_deployment_that_is_going() -> None:
    deployment = make_deployment(replicas=1)
    race(
        partial(scale_deployment, deployment.pk, replicas=8, actor="a", now=NOW),
        partial(delete_deployment, deployment.pk, actor="b", now=NOW),
        expect=(ConflictError,),
    )
    deployment.refresh_from_db()
    assert deployment.status == "deleting"
    assert [e.generation for e in history("deployment", deployment.pk)][-1] == deployment.generation


def test_names_of_replicas_made_at_once_are_all_different() -> None:
    deployment = make_deployment()
    make = partial(create_replicas, deployment.pk, 3, why="test", actor="test", now=NOW)
    race(make, make, make)
    assert Replica.objects.values("name").distinct().count() == 9
    assert Deployment.objects.get().next_ordinal == 10


def test_join_token_lets_one_node_in_however_many_try() -> None:
    token, text = create_join_token(actor="test", now=NOW)
    joins = [
        partial(enrol_node, token_text=text, node_id=uuid4(), name=f"n{i}", hostname="h", now=NOW)
        for i in range(4)
    ]
    results = race(*joins, expect=(DeniedError,))
    joined = [result for result in results if isinstance(result, Node)]
    assert len(joined) == 1 == Node.objects.count()
    token = JoinToken.objects.get(pk=token.pk)
    assert token.used_by_id == joined[0].pk


def test_one_name_is_given_to_one_node_and_the_other_token_is_not_spent() -> None:
    texts = [create_join_token(actor="test", now=NOW)[1] for _ in range(2)]
    joins = [
        partial(enrol_node, token_text=text, node_id=uuid4(), name="same", hostname="h", now=NOW)
        for text in texts
    ]
    results = race(*joins, expect=(ConflictError,))
    assert sum(isinstance(result, Node) for result in results) == 1
    assert JoinToken.objects.filter(used_at__isnull=True).count() == 1


def test_hint_rings_at_commit_only() -> None:
    deployment = make_deployment()
    with connection.cursor() as cursor:
        cursor.execute("LISTEN exaops")
        raw = cursor.connection
        assert raw is not None
        try:
            with pytest.raises(StaleError):
                scale_deployment(deployment.pk, replicas=9, actor="a", now=NOW, expected_generation=99)
            assert list(raw.notifies(timeout=0, stop_after=1)) == []
            scale_deployment(deployment.pk, replicas=9, actor="a", now=NOW)
            rung = [note.payload for note in raw.notifies(timeout=5, stop_after=2)]
        finally:
            cursor.execute("UNLISTEN *")
    assert f"deployment:{deployment.pk}" in rung
