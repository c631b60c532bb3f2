"""What services record, and what Postgres itself refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.models import Field
from django.db.models.base import Model as DjangoModel

from exaserve_ops.audit.models import Event
from exaserve_ops.audit.services import Subject, delete_events_before, record_event
from exaserve_ops.health.services import grant_lease
from exaserve_ops.inventory.domain.liveness import NODE_LIVENESS
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.services import create_join_token, delete_node, enrol_node
from exaserve_ops.lib.errors import ConflictError, DeniedError, InvalidInputError
from exaserve_ops.lib.lifecycle import IllegalTransitionError, Lifecycle
from exaserve_ops.serving.domain.architecture import Architecture
from exaserve_ops.serving.domain.lifecycle import DEPLOYMENT, REPLICA
from exaserve_ops.serving.domain.manifest import FileEntry
from exaserve_ops.serving.domain.observed import ObservedExit, ObservedReplica
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.selectors import node_rooms
from exaserve_ops.serving.services.deployments import (
    DeploymentWish,
    advance_deployment,
    create_deployment,
    delete_deployment,
    scale_deployment,
    update_deployment,
)
from exaserve_ops.serving.services.models import ModelFacts, register_model
from exaserve_ops.serving.services.observations import record_observations
from exaserve_ops.serving.services.replicas import (
    advance_replica,
    create_replicas,
    let_go_replica,
    place_replica,
    place_replicas,
    record_node_lost,
    record_wait,
)
from tests.fakes.world import GIB, NOW, make_deployment, make_model, make_node

pytestmark = pytest.mark.django_db

STATUS_FIELDS = [
    (Deployment, "status", DEPLOYMENT),
    (Replica, "status", REPLICA),
    (Node, "liveness", NODE_LIVENESS),
]


def observe(replica: Replica, seen: ObservedReplica) -> Replica | None:
    """Record what the agent of its node saw of one replica."""
    assert replica.node_id is not None
    rows = record_observations([seen], node_id=replica.node_id, actor="agent", now=NOW)
    return rows[seen.replica_id]


def placed(deployment: Deployment, node: Node) -> Replica:
    [replica] = create_replicas(deployment.pk, 1, why="test", actor="test", now=NOW)
    uuid = node.accelerators.all()[0].uuid
    return place_replica(
        replica.pk, Placement(str(node.pk), node.name, (uuid,), "test"), actor="test", now=NOW
    )


@pytest.mark.parametrize(
    ("model", "field", "lifecycle"), STATUS_FIELDS, ids=lambda x: getattr(x, "name", None)
)
def test_choices_and_check_are_in_step_with_the_table(
    model: type[DjangoModel], field: str, lifecycle: Lifecycle
) -> None:
    column = model._meta.get_field(field)
    assert isinstance(column, Field)
    assert column.choices == lifecycle.choices
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE conrelid = %s::regclass AND contype = 'c' AND conname LIKE %s",
            [model._meta.db_table, f"%_{field}_known"],
        )
        [(definition,)] = cursor.fetchall()
    assert set(re.findall(r"'(\w+)'", definition)) == set(lifecycle.statuses)


@pytest.mark.parametrize(
    ("model", "field", "_lifecycle"), STATUS_FIELDS, ids=lambda x: getattr(x, "name", None)
)
def test_unknown_status_is_refused_by_the_database(
    model: type[Deployment | Replica | Node], field: str, _lifecycle: Lifecycle
) -> None:
    deployment, node = make_deployment(), make_node("n1")
    placed(deployment, node)
    with pytest.raises(IntegrityError), transaction.atomic():
        model.objects.update(**{field: "resting"})


def test_running_replica_without_a_node_is_refused_by_the_database() -> None:
    replica = placed(make_deployment(), make_node("n1"))
    with pytest.raises(IntegrityError), transaction.atomic():
        Replica.objects.filter(pk=replica.pk).update(node=None)


def test_audit_rows_are_only_added_and_leave_by_retention_alone() -> None:
    old = record_event(Subject("node", "1", "n"), "tested", actor="test", now=NOW - timedelta(days=2))
    kept = record_event(Subject("node", "1", "n"), "tested", actor="test", now=NOW)
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        Event.objects.filter(pk=old.pk).update(reason="it was not me")
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        old.delete()
    assert delete_events_before(NOW - timedelta(days=1)) == 1
    assert [e.pk for e in Event.objects.all()] == [kept.pk]
    # What switched the guard off ended with the retention's own transaction step.
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL exaops.retention = 'off'")
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        kept.delete()


def test_spent_expired_and_unknown_tokens_are_refused_and_a_conflict_spends_none() -> None:
    _, text = create_join_token(actor="test", now=NOW, lifetime=timedelta(minutes=5))
    late = NOW + timedelta(minutes=5)
    with pytest.raises(DeniedError):
        enrol_node(token_text=text, node_id=uuid4(), name="n", hostname="", now=late)
    with pytest.raises(DeniedError):
        enrol_node(token_text="xj-guess", node_id=uuid4(), name="n", hostname="", now=NOW)
    first = enrol_node(token_text=text, node_id=uuid4(), name="n", hostname="", now=NOW)
    with pytest.raises(DeniedError):
        enrol_node(token_text=text, node_id=uuid4(), name="m", hostname="", now=NOW)
    token, other = create_join_token(actor="test", now=NOW)
    with pytest.raises(ConflictError, match="joined before"):
        enrol_node(token_text=other, node_id=first.pk, name="m", hostname="", now=NOW)
    with pytest.raises(ConflictError, match="is taken"):
        enrol_node(token_text=other, node_id=uuid4(), name="n", hostname="", now=NOW)
    with pytest.raises(InvalidInputError):
        enrol_node(token_text=other, node_id=uuid4(), name=" ", hostname="", now=NOW)
    token.refresh_from_db()
    assert token.used_at is None


def test_same_name_for_other_bytes_is_refused_and_for_the_same_is_no_change() -> None:
    facts = ModelFacts(
        source="file:///m",
        files=(FileEntry("model.safetensors", 10, "aa"),),
        architecture=Architecture("llama", 1, 8, 2, 1, 4, 16, 32, "float32"),
        parameter_count=1,
    )
    model = register_model(name="m", facts=facts, actor="test", now=NOW)
    assert register_model(name="m", facts=facts, actor="test", now=NOW).pk == model.pk
    assert Event.objects.filter(subject_kind="model").count() == 1
    other = replace(facts, files=(FileEntry("model.safetensors", 10, "bb"),))
    with pytest.raises(ConflictError, match="other bytes"):
        register_model(name="m", facts=other, actor="test", now=NOW)
    assert Model.objects.count() == 1


def test_name_is_free_again_once_its_deployment_is_deleted() -> None:
    model = make_model()
    wish = DeploymentWish(name="chat", model_id=model.pk, replicas=1, engine="torch")
    first = create_deployment(wish, actor="test", now=NOW)
    with pytest.raises(ConflictError):
        create_deployment(wish, actor="test", now=NOW)
    delete_deployment(first.pk, actor="test", now=NOW)
    with pytest.raises(ConflictError):
        create_deployment(wish, actor="test", now=NOW)
    advance_deployment(first.pk, "emptied", actor="test", now=NOW)
    assert create_deployment(wish, actor="test", now=NOW).pk != first.pk


def test_memory_left_out_is_computed_from_the_model() -> None:
    model = make_model()
    wish = DeploymentWish(name="chat", model_id=model.pk, replicas=1, engine="torch")
    made = create_deployment(wish, actor="test", now=NOW)
    kv = 4 * (model.kv_bytes_per_token or 0) * (model.max_context_tokens or 0)
    assert made.replica_memory_bytes == (model.weights_bytes + kv) * 5 // 4 > 0


def test_same_wish_again_is_no_change_and_leaves_no_event() -> None:
    deployment = make_deployment(replicas=2)
    before = Event.objects.count()
    assert scale_deployment(deployment.pk, replicas=2, actor="a", now=NOW).generation == 1
    same = {"replicas": 2, "drain_seconds": 60, "nodes": []}
    assert update_deployment(deployment.pk, same, actor="a", now=NOW).generation == 1
    assert Event.objects.count() == before


def test_change_says_what_it_changed() -> None:
    deployment = make_deployment(replicas=2)
    update_deployment(deployment.pk, {"replicas": 3, "drain_seconds": 5}, actor="user:ann", now=NOW)
    event = Event.objects.latest("pk")
    assert (event.actor, event.event, event.generation) == ("user:ann", "changed", 2)
    assert event.reason == "replicas 2 to 3, drain_seconds 60 to 5"


def test_numbers_that_no_fleet_has_and_engines_that_no_node_has_are_refused_by_name() -> None:
    model = make_deployment().model
    for name, value in (("drain_seconds", 10**11), ("replicas", 10**9), ("accelerators_per_replica", 0)):
        wish = DeploymentWish(
            name="big", model_id=model.pk, engine="torch", **({"replicas": 1} | {name: value})
        )
        with pytest.raises(InvalidInputError) as refused:
            create_deployment(wish, actor="user:test", now=NOW)
        assert refused.value.field == name
    wish = DeploymentWish(name="odd", model_id=model.pk, replicas=1, engine="nope; rm")
    with pytest.raises(InvalidInputError, match="no node offers"):
        create_deployment(wish, actor="user:test", now=NOW)


@pytest.mark.parametrize("replicas", [-1, 100_001, True, 1.5, "2", None])
def test_number_of_replicas_that_is_none_is_refused(replicas: object) -> None:
    deployment = make_deployment()
    with pytest.raises(InvalidInputError):
        scale_deployment(deployment.pk, replicas=replicas, actor="a", now=NOW)  # type: ignore[arg-type]  # on purpose


def test_late_sighting_of_a_stopped_replica_changes_nothing_but_its_facts() -> None:
    replica = placed(make_deployment(), make_node("n1"))
    let_go_replica(replica.pk, "stop", why="test", actor="test", now=NOW)
    advance_replica(replica.pk, "seen_stopped", reason="gone", actor="test", now=NOW)
    late = ObservedReplica(str(replica.pk), 1, "ready", attempt=1, reason="back")
    seen = observe(replica, late)
    assert seen is not None
    assert (seen.status, seen.wanted) == ("stopped", "stop")


def test_replica_that_nobody_knows_or_of_another_node_is_not_recorded() -> None:
    replica = placed(make_deployment(), make_node("n1"))
    other = make_node("n2")
    stranger = ObservedReplica(str(uuid4()), 1, "ready")
    known = record_observations([stranger], node_id=other.pk, actor="agent", now=NOW)
    assert known == {stranger.replica_id: None}
    stolen = ObservedReplica(str(replica.pk), 1, "ready")
    known = record_observations([stolen], node_id=other.pk, actor="agent", now=NOW)
    assert known == {stolen.replica_id: None}
    replica.refresh_from_db()
    assert replica.status == "placed"


def test_many_sightings_at_once_are_each_recorded_with_an_event_of_their_own() -> None:
    deployment, node = make_deployment(), make_node("n1")
    first, second, third = (placed(deployment, node) for _ in range(3))
    begun = Event.objects.count()
    sightings = [
        ObservedReplica(str(first.pk), 1, "starting", attempt=1),
        ObservedReplica(str(second.pk), 1, "ready", attempt=1, address="a:1"),
        ObservedReplica(str(third.pk), 1, "backing_off", attempt=1, reason="no memory"),
    ]
    record_observations(sightings, node_id=node.pk, actor="agent", now=NOW)
    events = Event.objects.order_by("pk")[begun:]
    assert [(e.subject_id, e.from_status, e.to_status, e.reason) for e in events] == [
        (str(first.pk), "placed", "starting", ""),
        (str(second.pk), "placed", "ready", ""),
        (str(third.pk), "placed", "backing_off", "no memory"),
    ]
    for row in (first, second, third):
        row.refresh_from_db()
    assert [row.status for row in (first, second, third)] == ["starting", "ready", "backing_off"]


def test_replicas_are_placed_all_or_none() -> None:
    deployment, node = make_deployment(), make_node("n1")
    gone, pending = create_replicas(deployment.pk, 2, why="test", actor="test", now=NOW)
    advance_replica(gone.pk, "cancel", reason="changed my mind", actor="test", now=NOW)
    placement = Placement(str(node.pk), node.name, (), "test")
    with pytest.raises(IllegalTransitionError):
        place_replicas({gone.pk: placement, pending.pk: placement}, actor="test", now=NOW)
    pending.refresh_from_db()
    assert (pending.status, pending.node_id) == ("pending", None)


def test_exit_is_told_once_for_each_attempt() -> None:
    replica = placed(make_deployment(), make_node("n1"))
    end = ObservedExit(attempt=1, code=None, signal=9, after_seconds=1.25, log_tail=("bye",))
    seen = ObservedReplica(str(replica.pk), 1, "backing_off", attempt=1, last_exit=end)
    for _ in range(3):
        observe(replica, seen)
    [event] = Event.objects.filter(event="exited")
    assert event.reason == "attempt 1 killed by signal 9 after 1.2 s"
    replica.refresh_from_db()
    assert (replica.exit_signal, replica.exit_log_tail, replica.status) == (9, ["bye"], "backing_off")


def test_exit_that_nobody_saw_has_no_time() -> None:
    replica = placed(make_deployment(), make_node("n1"))
    end = ObservedExit(attempt=1, code=None, signal=None, after_seconds=0.0, log_tail=())
    observe(replica, ObservedReplica(str(replica.pk), 1, "backing_off", attempt=1, last_exit=end))
    assert Event.objects.get(event="exited").reason == "attempt 1 ended; how is not known"
    replica.refresh_from_db()
    assert (replica.exit_attempt, replica.exit_after_seconds) == (1, None)


def test_waiting_is_told_once_for_each_reason() -> None:
    [replica] = create_replicas(make_deployment().pk, 1, why="test", actor="test", now=NOW)
    for why in ("no room", "no room", "cordoned"):
        record_wait(replica.pk, why, actor="test", now=NOW)
    assert Event.objects.filter(event="waits").count() == 2


def test_lost_node_makes_its_running_replicas_unreachable_and_keeps_the_wish_of_the_rest() -> None:
    deployment, node = make_deployment(), make_node("n1")
    running, going = placed(deployment, node), placed(deployment, node)
    advance_replica(running.pk, "seen_ready", reason="", actor="test", now=NOW)
    let_go_replica(going.pk, "stop", why="test", actor="test", now=NOW)
    assert record_node_lost(node.pk, reason="3 missed", actor="test", now=NOW) == 1
    running.refresh_from_db()
    going.refresh_from_db()
    assert (running.status, running.wanted) == ("unreachable", "run")
    assert (going.status, going.reason) == ("stopping", "node offline: 3 missed")


def test_new_boot_gets_a_new_lease_epoch_and_the_same_boot_keeps_its_own() -> None:
    node = make_node("n1")
    first = grant_lease(node.pk, boot_id="b1", renew=False, now=NOW)
    later = NOW + timedelta(seconds=1)
    assert grant_lease(node.pk, boot_id="b1", renew=False, now=later).epoch == first.epoch
    assert grant_lease(node.pk, boot_id="b2", renew=False, now=later).epoch == first.epoch + 1
    assert grant_lease(node.pk, boot_id="b2", renew=True, now=later).epoch == first.epoch + 2


def test_node_with_replicas_cannot_be_deleted_and_one_without_can() -> None:
    busy, idle = make_node("n1"), make_node("n2")
    placed(make_deployment(), busy)
    with pytest.raises(ConflictError, match="replicas"):
        delete_node(busy.pk, actor="user:ann", now=NOW)
    delete_node(idle.pk, actor="user:ann", now=NOW)
    assert list(Node.objects.values_list("name", flat=True)) == ["n1"]
    assert Event.objects.latest("pk").event == "deleted"


def test_promised_memory_is_counted_on_every_accelerator() -> None:

    deployment, node = make_deployment(), make_node("n1")
    placed(deployment, node)
    [room] = node_rooms(deployment.pk, now=NOW)
    assert [a.reserved_bytes for a in room.accelerators] == [GIB, 0]
    assert (room.same_deployment, room.replicas, room.rack) == (1, 1, "r1")
