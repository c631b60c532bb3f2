"""The form of a new deployment has the options of its engine, and a pasted launch fills it in."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.inventory.models import Node
from exaserve_ops.serving.models import Deployment
from tests.fakes.world import make_model, make_node

pytestmark = pytest.mark.django_db


def node_with(name: str, **versions: str) -> Node:
    node = make_node(name)
    node.engines = [*node.engines, *versions]
    node.engine_versions = versions
    node.save()
    return node


def form_for(**more: object) -> dict[str, Any]:
    fixed = {
        "replicas": 1,
        "engine": "vllm",
        "drain_seconds": 60,
        "accelerators_per_replica": 1,
        "step": "plan",
    }
    return {"name": "chat", "model": str(make_model().pk), **fixed, **more}


def create(client: Client, form: dict[str, Any]) -> Deployment:
    page = client.post(reverse("deployment_new"), form).content.decode()
    planned = re.search(r'name="planned" value="(\w+)"', page)
    assert planned, page
    client.post(reverse("deployment_new"), form | {"step": "create", "planned": planned[1]})
    return Deployment.objects.get()


def test_every_option_of_the_chosen_engine_has_a_field_with_its_meaning_and_default(operator: Client) -> None:
    node_with("gpu-1", vllm="0.33.0")
    make_model()
    page = operator.get(reverse("deployment_options"), {"engine": "vllm"}).content.decode()
    assert 'name="o-tensor_parallel_size"' in page
    assert "Longest prompt and answer together, in tokens. Default: what config.json says." in page
    assert "swap_space" not in page
    assert 'name="o-environment"' in page
    ours = operator.get(reverse("deployment_options"), {"engine": "torch"}).content.decode()
    assert 'name="o-kv_pool"' in ours
    assert 'name="o-environment"' not in ours
    assert "not known here" in operator.get(reverse("deployment_options"), {"engine": "x"}).content.decode()


def test_fields_that_say_something_become_options_and_empty_ones_are_left_to_the_engine(
    operator: Client,
) -> None:
    node_with("gpu-1", vllm="0.33.0")
    fields = {
        "o-max_model_len": "2048",
        "o-enable_prefix_caching": "false",
        "o-gpu_memory_utilization": "0.5",
        "o-kv_cache_dtype": "fp8",
        "o-max_num_seqs": "",
        "engine_options": "seed = 3",
    }
    made = create(operator, form_for(**fields))
    assert made.engine_options == {
        "seed": 3,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "kv_cache_dtype": "fp8",
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"o-max_model_len": "-1"}, "greater than or equal to 1"),
        ({"o-hf_overrides": "{x"}, "hf_overrides is no JSON"),
        ({"o-kv_cache_dtype": "int3"}, "Select a valid choice"),
        ({"o-seed": "1", "engine_options": "seed = 2"}, "seed: said here and in a field below"),
        ({"o-extra_arguments": "--port 1"}, "may not hold --port: the agent decides that"),
        ({"o-environment": "LD_PRELOAD=x"}, "may not hold LD_PRELOAD"),
        ({"engine_options": "swap_space = 4"}, "use kv_offloading_size"),
        ({"engine_options": "tensor_paralel_size = 4"}, "unknown option tensor_paralel_size"),
        (
            {"o-tensor_parallel_size": "4"},
            "need 4 for each replica, not 1: give 4, or let the parallel sizes multiply to 1",
        ),
    ],
)
def test_what_the_engine_would_not_start_with_is_said_beside_the_field(
    operator: Client, fields: dict[str, str], words: str
) -> None:
    node_with("gpu-1", vllm="0.33.0")
    answer = operator.post(reverse("deployment_new"), form_for(**fields))
    assert answer.status_code == 422
    assert words in answer.content.decode().replace("&#x27;", "'")
    assert not Deployment.objects.exists()


def test_nodes_with_an_older_version_are_named_where_it_lacks_an_option(operator: Client) -> None:
    node_with("gpu-1", vllm="0.33.0")
    node_with("gpu-2", vllm="0.10.1")
    answer = operator.post(reverse("deployment_new"), form_for(**{"o-kv_offloading_size": "8"}))
    page = answer.content.decode()
    assert answer.status_code == 422
    assert "came with version 0.11.1, and this is 0.10.1" in page
    assert "on gpu-2" in page
    # One that was retired is history.
    Node.objects.filter(name="gpu-2").update(liveness="retired")
    answer = operator.post(reverse("deployment_new"), form_for(**{"o-kv_offloading_size": "8"}, name="b"))
    assert answer.status_code == 200


def test_node_page_names_the_versions_that_it_has(operator: Client) -> None:
    node = node_with("gpu-1", vllm="0.32.0+cpu")
    assert "0.32.0+cpu" in operator.get(reverse("node", args=[node.pk])).content.decode()


def test_pasted_launch_fills_the_form_in_and_says_what_was_left_out(operator: Client) -> None:
    node_with("gpu-1", vllm="0.33.0")
    model = make_model("llama")
    text = "VLLM_API_KEY=topsecret vllm serve org/llama -tp=2 --max_model_len=8k --swap-space 4 --lora-x 2"
    page = operator.post(reverse("deployment_import"), {"text": text})
    words = page.content.decode()
    assert page.status_code == 200
    assert 'name="o-max_model_len" value="8000"' in words
    assert 'name="o-tensor_parallel_size" value="2"' in words
    assert f'<option value="{model.pk}" selected>' in words
    assert "kv_offloading_size, which keeps KV in host memory" in words
    assert "topsecret" not in words.replace(text.split(maxsplit=1)[0], "")
    assert not Deployment.objects.exists()


def test_pasted_launch_over_nodes_fills_in_both_sizes(operator: Client) -> None:
    node_with("gpu-1", vllm="0.33.0")
    text = "vllm serve m -tp 8 -pp 4 --nnodes 4 --node-rank 0 --master-addr h"
    form = operator.post(reverse("deployment_import"), {"text": text}).context["form"]
    assert form["nodes_per_replica"].value() == 4
    assert form["accelerators_per_replica"].value() == 8


def test_paste_that_cannot_be_read_keeps_the_text_and_says_why(operator: Client) -> None:
    answer = operator.post(reverse("deployment_import"), {"text": "python train.py --lr 1"})
    assert answer.status_code == 422
    assert "no engine is started by it" in answer.content.decode()
    assert "train.py" in answer.content.decode()


def test_of_several_deployments_any_can_be_chosen(operator: Client) -> None:
    node_with("gpu-1", vllm="0.33.0")
    make_model()
    specs = [
        f"- {{name: {name}, modelURL: m, vllmConfig: {{maxModelLen: {n}}}}}"
        for n, name in ((1, "one"), (2, "two"))
    ]
    text = "modelSpec:\n" + "\n".join(specs)
    first = operator.post(reverse("deployment_import"), {"text": text}).content.decode()
    assert "2 deployments are described" in first
    assert 'name="o-max_model_len" value="1"' in first
    second = operator.post(reverse("deployment_import"), {"text": text, "draft": 1}).content.decode()
    assert 'name="o-max_model_len" value="2"' in second
    assert 'value="two"' in second


def test_engine_that_no_node_offers_is_said_so(operator: Client) -> None:
    make_node("gpu-1")
    make_model()
    page = operator.post(
        reverse("deployment_import"), {"text": "sglang serve --model-path m"}
    ).content.decode()
    assert "No node offers SGLang" in page
    assert "EXAOPS_AGENT_SGLANG_PYTHON" in page


def test_import_for_an_engine_that_no_node_offers_chooses_none_and_keeps_its_options(
    operator: Client,
) -> None:
    make_node("gpu-1")
    Node.objects.update(engines=["simulated", "simulated-node", "torch"])
    model = make_model("llama")
    drafted = operator.post(
        reverse("deployment_import"), {"text": "vllm serve org/llama --seed 3 --max-model-len 8k"}
    )
    engine = str(drafted.context["form"]["engine"])
    assert '<option value="">Choose an engine</option>' in engine
    assert "selected" not in engine  # so a browser sends the first one, which is none
    sent = {
        "name": "llama", "model": str(model.pk), "replicas": 1, "engine": "", "drafted_engine": "vllm",
        "drain_seconds": 60, "accelerators_per_replica": 1, "step": "plan", "o-seed": 3,
    }  # fmt: skip
    hidden = drafted.context["form"]["drafted_engine"]
    assert (hidden.value(), str(hidden) in drafted.content.decode()) == ("vllm", True)
    refused = operator.post(reverse("deployment_new"), sent)
    page = refused.content.decode()
    assert refused.status_code == 422
    assert "Choose an engine that a node offers, or give an agent the interpreter" in page
    assert 'name="o-seed" value="3"' in page
    assert "plan" not in refused.context
    assert '<option value="" selected>Choose an engine</option>' in page


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (["simulated", "simulated-node", "torch", "vllm", "sglang"], "torch"),
        (["simulated", "vllm"], "vllm"),
        (["simulated"], "simulated"),
    ],
)
def test_new_deployment_begins_with_an_engine_that_answers_for_real_where_there_is_one(
    operator: Client, offered: list[str], chosen: str
) -> None:
    make_node("gpu-1")
    Node.objects.update(engines=offered)
    page = operator.get(reverse("deployment_new"))
    values = re.findall(r'<option value="([^"]*)"', str(page.context["form"]["engine"]))
    assert values[0] == chosen
    assert sorted(values) == sorted(offered)
    assert page.context["options"].table.engine == chosen


def test_long_form_says_at_its_top_all_that_is_wrong_with_a_way_to_each_field(operator: Client) -> None:
    node_with("gpu-1", vllm="0.33.0")
    wrong = {"drain_seconds": "soon", "o-max_model_len": "-1", "o-gpu_memory_utilization": "7"}
    answer = operator.post(reverse("deployment_new"), form_for(**wrong))
    assert answer.status_code == 422
    above, _, fields = answer.content.decode().partition("First mend:")[2].partition("</ul>")
    assert re.findall(r'href="#(\w+(?:-\w+)*)"', above) == [
        "id_drain_seconds",
        "id_o-max_model_len",
        "id_o-gpu_memory_utilization",
    ]
    assert all(f'id="{name}"' in fields for name in re.findall(r'href="#([\w-]+)"', above))
    fine = operator.post(reverse("deployment_new"), form_for()).content.decode()
    assert "First mend:" not in fine
