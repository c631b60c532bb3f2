"""Capacity plans over REST: the answer, what is refused and by which name, and who may ask."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from exaserve_ops.api.views.capacity import _FLEET_OF_1536
from exaserve_ops.audit.models import Event
from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Deployment, Model
from exaserve_ops.serving.services.replicas import create_replicas, place_replica
from exaserve_ops.telemetry.models import ReplicaMinute
from tests.fakes.world import (
    NOW,
    JsonClient,
    client_with_key,
    make_deployment,
    make_model,
    make_node,
    make_user,
)

PATH = "/api/v1/capacity/plan"
GIB = 1 << 30
LOAD = {"prompt_tokens": 384, "output_tokens": 128, "limit_tokens": 2048}


def example() -> dict[str, Any]:
    return copy.deepcopy(_FLEET_OF_1536.value)


def changed(**workload: Any) -> dict[str, Any]:
    body = example()
    body["workloads"][0] |= workload
    return body


def test_example_of_the_schema_is_answered_as_it_says(viewer: JsonClient) -> None:
    answer = viewer.post(PATH, example())
    assert answer.status_code == 200, answer.json()
    plan = answer.json()
    assert (plan["nodes"], plan["replicas"]) == (128, 1536)
    (model,) = plan["workloads"]
    assert model["replicas_per_group"] == 3
    assert model["share_option"] == {"gpu_memory_utilization": "0.32"}
    assert model["memory"]["kv"]["growth_bytes_per_token"] == 131_072
    assert model["memory"]["kv"]["terms"] == [
        {
            "name": "full attention",
            "formula": "2 x 32 layers x 8 KV heads x 128 x 2 B",
            "bytes": 131_072,
            "per": "token",
        }
    ]
    memory = model["memory"]
    assert memory["needed_bytes"] < memory["wanted_bytes"] < memory["reserved_bytes"]
    assert any("Little's law" in text for text in model["assumptions"])


def test_asking_changes_nothing_and_leaves_no_event(viewer: JsonClient) -> None:
    before = Event.objects.count()
    assert viewer.post(PATH, example()).status_code == 200
    assert Event.objects.count() == before


def test_registered_model_on_an_accelerator_of_the_fleet_needs_no_sizes(viewer: JsonClient) -> None:
    model = make_model("tiny")
    node = make_node("n1", accelerators=2)
    card = node.accelerators.first()
    assert card is not None
    name = card.name or card.kind
    body = {"accelerator": {"name": name}, "workloads": [{"model": "tiny", "engine": "torch", "load": LOAD}]}
    answer = viewer.post(PATH, body).json()
    assert answer["workloads"][0]["memory"]["weights_bytes"] == model.weights_bytes
    assert answer["workloads"][0]["memory"]["kv"]["growth_bytes_per_token"] == model.kv_bytes_per_token
    assert answer["nodes"] == 1


def test_rates_that_were_measured_stand_in_for_what_is_not_stated(viewer: JsonClient) -> None:
    deployment: Deployment = make_deployment("chat")
    replica = create_replicas(deployment.pk, 1, why="one", actor="test", now=NOW)[0]
    for minute, tokens in ((1, 300.0), (2, 500.0)):
        ReplicaMinute.objects.create(
            replica_id=replica.pk,
            minute=clock.now() - timedelta(minutes=minute),
            requests_running_mean=20.0,
            generation_tokens_per_second_mean=tokens,
            ttft_p95_seconds_max=0.6,
        )
    body = changed(measured_from="chat", seconds_per_request=None)
    told = viewer.post(PATH, body).json()["workloads"][0]["assumptions"]
    # 800 tokens a second over 40 running: 20 a sequence, so 128 tokens take 6.4 s after 0.6 s.
    assert "a request takes 7 s (measured)" in told
    assert "a replica makes 500 tokens a second (measured)" in told
    stated = viewer.post(PATH, changed(measured_from="chat")).json()["workloads"][0]["assumptions"]
    assert "a request takes 8 s (stated)" in stated
    assert "a replica makes 500 tokens a second (measured)" in stated


def test_layout_that_is_not_known_is_refused_with_its_bound_and_planned_if_that_is_accepted(
    viewer: JsonClient,
) -> None:
    config = example()["workloads"][0]["config"] | {"model_type": "newcomer", "compress_ratios": [4]}
    (refusal,) = viewer.post(PATH, changed(config=config)).json()["refusals"]
    assert "Unsupported attention layout" in refusal["reason"]
    assert refusal["upper_bound_bytes_per_token"] == 131_072
    accepted = viewer.post(PATH, changed(config=config, accept_upper_bound=True)).json()
    assert accepted["workloads"][0]["memory"]["kv"]["growth_bytes_per_token"] == 131_072
    measured = viewer.post(PATH, changed(config=config, measured_kv_bytes_per_token=15_943)).json()
    assert measured["workloads"][0]["memory"]["kv"]["growth_bytes_per_token"] == 15_943


def test_unknown_weights_are_refused_and_never_nothing(viewer: JsonClient) -> None:
    (refusal,) = viewer.post(PATH, changed(weights_bytes=None)).json()["refusals"]
    assert "size of the weights is unknown" in refusal["reason"]
    Model.objects.filter(pk=make_model("model-v2").pk).update(weights_bytes=0)
    by_name = changed(model="model-v2", weights_bytes=None)
    assert "unknown" in viewer.post(PATH, by_name).json()["refusals"][0]["reason"]


def test_model_that_does_not_fit_comes_with_what_would_make_it_fit(viewer: JsonClient) -> None:
    body = changed(
        sequences_per_replica=None,
        engine_options={"max_model_len": 60_000, "gpu_memory_utilization": 0.9},
    )
    body["accelerator"] = {"memory_bytes": 24 * GIB, "per_node": 8}
    (refusal,) = viewer.post(PATH, body).json()["refusals"]
    assert refusal["memory"]["verdict"] == "does not fit"
    offers = {fix["kind"]: fix["options"] for fix in refusal["fixes"]}
    assert offers["more_accelerators"] == {"tensor_parallel_size": "2"}
    assert int(offers["shorter_context"]["max_model_len"]) < 60_000


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("accelerator",), {"per_node": 8}, "accelerator.memory_bytes"),
        (("accelerator",), {"name": "nothing like it"}, "accelerator.name"),
        (("accelerator",), {"memory_bytes": 0}, "accelerator"),
        (("spare_ratio",), 1.0, "spare_ratio"),
        (("workloads",), [], "workloads"),
        (("workloads", 0, "model"), "none such", "model"),
        (("workloads", 0, "config"), {}, "config"),
        (("workloads", 0, "engine"), "other", "workloads"),
        (("workloads", 0, "engine_options"), {"max_model_len": "long"}, "engine_options.max_model_len"),
        (("workloads", 0, "measured_from"), "nowhere", "measured_from"),
        (("workloads", 0, "load", "prompt_tokens"), -1, "workloads"),
        (("workloads", 0, "load", "prompt_token"), 1, "workloads"),
        (("workloads", 0, "seconds_per_request"), "NaN", "workloads"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(
    viewer: JsonClient, path: tuple[str | int, ...], value: object, field: str
) -> None:
    body: Any = example()
    place = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    answer = viewer.post(PATH, body)
    assert answer.status_code == 400, answer.json()
    assert field in answer.json()["error"]["fields"]


def test_deployment_tells_three_numbers_apart(viewer: JsonClient, telemetry: Any) -> None:
    deployment, node = make_deployment("chat"), make_node("n1", accelerators=1)
    replica = create_replicas(deployment.pk, 1, why="one", actor="test", now=NOW)[0]
    place_replica(
        replica.pk,
        Placement(str(node.pk), node.name, (node.accelerators.get().uuid,), "room"),
        actor="test",
        now=NOW,
    )
    path = f"/api/v1/deployments/{deployment.pk}/memory"
    silent = viewer.get(path).json()
    assert (silent["observed_bytes"], silent["observed"], silent["reserved_bytes"]) == (None, [], GIB)
    assert 0 < silent["needed_low_bytes"] < silent["needed_bytes"]
    told = {"replicas": {str(replica.pk): {"memory_used_bytes": 3 * GIB}}}
    telemetry.nodes[str(node.pk)] = told | {"received_at": clock.unix_seconds()}
    seen = viewer.get(path).json()
    assert seen["observed_bytes"] == 3 * GIB
    assert [(row["name"], row["over_bytes"]) for row in seen["observed"]] == [(replica.name, 2 * GIB)]
    telemetry.nodes[str(node.pk)] = told | {"received_at": clock.unix_seconds() - 60}
    assert viewer.get(path).json()["observed_bytes"] is None


@pytest.mark.django_db
def test_who_may_not_see_models_may_not_ask() -> None:
    stranger = client_with_key(make_user("stranger"))
    assert stranger.post(PATH, example()).status_code == 403
    assert client_with_key(make_user("vic", "viewer")).post(PATH, example()).status_code == 200
