"""A prewarm policy puts weights on nodes while they are quiet, and lets go of them when it ends."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID, uuid4

import pytest

from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.audit.models import Event
from exaserve_ops.controllers.prewarm import PrewarmWatch
from exaserve_ops.lib.errors import ConflictError, InvalidInputError
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.services.models import register_model
from exaserve_ops.serving.services.weights import end_prewarm, pause_prewarm, set_prewarm
from exaserve_ops.weights.domain.prewarm import PrewarmRules
from exaserve_ops.weights.models import PrewarmPolicy, WeightsClaim
from tests.fakes.fleet import NOW, ScriptedNode
from tests.fakes.leader import Leader
from tests.fakes.world import make_model
from workers.engines.demo_model import make_demo_model
from workers.protocol.observed import ObservedState, ReplicaObserved, ReplicaTelemetry
from workers.protocol.weights import WeightsReport

pytestmark = pytest.mark.django_db


@pytest.fixture
def model(tmp_path: Path) -> Model:
    make_demo_model(tmp_path / "demo", seed=0)
    return register_model(
        name="demo", facts=ModelFolder().read(str(tmp_path / "demo")), actor="test", now=NOW
    )


def look(leader: Leader, node: ScriptedNode, *, used_ratio: float = 0.0, problem: str = "") -> None:
    load = ReplicaTelemetry(window_seconds=10.0, kv_used_ratio=used_ratio)
    seen = ReplicaObserved(replica_id=str(uuid4()), generation=1, state=ObservedState.READY, telemetry=load)
    node.beat(seen, weights=WeightsReport(problem=problem))
    leader.work()
    PrewarmWatch(leader.state).step()


def claims() -> list[tuple[str, bool]]:
    return list(WeightsClaim.objects.values_list("owner", "paused"))


def test_a_quiet_node_is_told_and_a_busy_one_waits(leader: Leader, node: ScriptedNode, model: Model) -> None:
    set_prewarm(model.pk, PrewarmRules(""), actor="test", now=NOW, reason="launch")
    look(leader, node, used_ratio=0.9)
    assert claims() == []
    assert "90% busy" in PrewarmPolicy.objects.get().note
    look(leader, node)
    assert claims() == [("prewarm", False)]
    assert PrewarmPolicy.objects.get().note == ""
    look(leader, node, used_ratio=0.9)
    assert claims() == [("prewarm", True)]
    look(leader, node)
    assert claims() == [("prewarm", False)]
    assert end_prewarm(model.pk, actor="test", now=NOW)
    assert not end_prewarm(model.pk, actor="test", now=NOW)
    assert claims() == []
    told = Event.objects.filter(subject_kind="model", event__startswith="prewarm")
    assert sorted(told.values_list("event", flat=True)) == ["prewarm_changed", "prewarm_ended"]


def test_a_paused_policy_begins_nothing_and_goes_on_by_its_rules(
    leader: Leader, node: ScriptedNode, model: Model
) -> None:
    set_prewarm(model.pk, PrewarmRules(""), actor="test", now=NOW, reason="launch")
    look(leader, node)
    assert pause_prewarm(model.pk, paused=True, actor="test", now=NOW, reason="the link is needed")
    assert not pause_prewarm(model.pk, paused=True, actor="test", now=NOW)
    look(leader, node)
    assert claims() == [("prewarm", True)]
    assert pause_prewarm(model.pk, paused=False, actor="test", now=NOW)
    look(leader, node)
    assert claims() == [("prewarm", False)]
    told = Event.objects.filter(subject_kind="model", event__startswith="prewarm").order_by("pk")
    assert [*told.values_list("event", flat=True)] == [
        "prewarm_changed",
        "prewarm_paused",
        "prewarm_resumed",
    ]


def test_a_node_whose_disk_cannot_be_used_is_passed_over(
    leader: Leader, node: ScriptedNode, model: Model
) -> None:
    set_prewarm(model.pk, PrewarmRules(""), actor="test", now=NOW)
    look(leader, node, problem="the disk is read-only")
    assert claims() == []
    assert "takes nothing new" in PrewarmPolicy.objects.get().note


def test_another_speed_holds_for_what_is_fetched_already(
    leader: Leader, node: ScriptedNode, model: Model
) -> None:
    set_prewarm(model.pk, PrewarmRules(""), actor="test", now=NOW)
    look(leader, node)
    set_prewarm(model.pk, PrewarmRules("", bytes_per_second=5_000_000), actor="test", now=NOW)
    look(leader, node)
    claim = WeightsClaim.objects.get()
    assert (claim.bytes_per_second, claim.node_id) == (5_000_000, UUID(node.node_id))


@pytest.mark.parametrize(
    "rules",
    [
        PrewarmRules("", busiest_ratio=1.5),
        PrewarmRules("", from_minute=1440),
        PrewarmRules("", from_minute=60, until_minute=60),
        PrewarmRules("", at_once=0),
        PrewarmRules("", bytes_per_second=1000),
        PrewarmRules("", node_names=("nobody",)),
    ],
)
def test_rules_that_make_no_sense_are_refused(model: Model, rules: PrewarmRules) -> None:
    with pytest.raises(InvalidInputError):
        set_prewarm(model.pk, rules, actor="test", now=NOW)
    assert not PrewarmPolicy.objects.exists()


def test_a_model_without_a_manifest_cannot_be_fetched_ahead() -> None:
    with pytest.raises(ConflictError, match="no manifest"):
        set_prewarm(make_model("bare").pk, PrewarmRules(""), actor="test", now=NOW)
