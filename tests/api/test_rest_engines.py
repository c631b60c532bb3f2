"""Engines tell their options over REST, and a pasted launch is read into drafts."""

from __future__ import annotations

import pytest

from exaserve_ops.serving.models import Deployment
from tests.fakes.world import JsonClient, make_node

pytestmark = pytest.mark.django_db


def test_engines_tell_their_options_and_the_versions_that_nodes_have(operator: JsonClient) -> None:
    node = make_node("gpu-1")
    node.engines = [*node.engines, "vllm"]
    node.engine_versions = {"vllm": "0.33.0"}
    node.save()
    answer = operator.get("/api/v1/engines")
    assert answer.status_code == 200
    engines = {engine["name"]: engine for engine in answer.json()}
    assert engines["vllm"]["versions"] == {"0.33.0": 1}
    assert engines["torch"]["versions"] == {"": 1}
    assert engines["sglang"]["versions"] == {}
    options = {option["name"]: option for option in engines["vllm"]["options"]}
    assert options["swap_space"]["until"] == "0.18"
    assert options["max_model_len"] == {
        "name": "max_model_len",
        "group": "length",
        "help": "Longest prompt and answer together, in tokens.",
        "takes": "a whole number from 1 to 100,000,000",
        "default": "what config.json says",
        "flag": "--max-model-len",
        "since": "",
        "until": "",
        "instead": "",
    }


def test_pasted_launch_becomes_drafts_and_stores_nothing(operator: JsonClient) -> None:
    answer = operator.post(
        "/api/v1/deployments/import", {"text": "vllm serve /m -tp 2 --seed 3 --api-key KEYONE --swap-space 1"}
    )
    assert answer.status_code == 200, answer.json()
    (draft,) = answer.json()["drafts"]
    assert draft["engine_options"] == {"tensor_parallel_size": 2, "seed": 3}
    assert draft["accelerators_per_replica"] == 2
    assert [line["said"] for line in draft["not_understood"]] == ["--swap-space 1"]
    assert "KEYONE" not in answer.content.decode()
    assert not Deployment.objects.exists()


def test_pasted_launch_says_every_engine_and_no_secret(operator: JsonClient) -> None:
    text = "bash -c 'MY_TOKEN=abcd1234 vllm serve a & sglang serve --model b'; A_KEY=efgh5678 vllm serve c"
    answer = operator.post("/api/v1/deployments/import", {"text": text})
    assert [draft["model"] for draft in answer.json()["drafts"]] == ["a", "b", "c"]
    assert not [secret for secret in ("abcd1234", "efgh5678") if secret in answer.content.decode()]


def test_pasted_launch_over_nodes_has_both_sizes(operator: JsonClient) -> None:
    text = "srun -N4 vllm serve m -tp 8 -pp 4 --nnodes 4 --node-rank 0 --master-addr h"
    (draft,) = operator.post("/api/v1/deployments/import", {"text": text}).json()["drafts"]
    assert (draft["nodes_per_replica"], draft["accelerators_per_replica"]) == (4, 8)
    assert {"said": "--nnodes 4", "became": "nodes_per_replica 4"} in draft["understood"]
    assert draft["understood"][0]["said"] == "srun -N4"


def test_paste_that_cannot_be_read_is_refused_with_the_reason(operator: JsonClient) -> None:
    answer = operator.post("/api/v1/deployments/import", {"text": "a: &x [1]\nb: *x"})
    assert answer.status_code == 400
    assert "aliases" in str(answer.json())


def test_options_that_the_engine_lacks_are_refused_by_name(operator: JsonClient) -> None:
    answer = operator.post(
        "/api/v1/deployments",
        {
            "name": "a",
            "model": "00000000-0000-4000-8000-000000000000",
            "replicas": 1,
            "engine": "torch",
            "engine_options": {"num_blocks": "many"},
        },
    )
    assert answer.status_code == 400
