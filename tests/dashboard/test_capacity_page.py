"""The capacity page: a question in the address, and an answer that shows its arithmetic."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.serving.models import Model
from tests.fakes.world import make_model, make_node

PAGE = "/capacity"
LOAD = {"prompt_tokens": "384", "output_tokens": "128", "limit_tokens": "2048", "replicas": "3"}


def page(client: Client, **query: Any) -> str:
    answer = client.get(reverse("capacity"), query)
    assert answer.status_code == 200
    return html.unescape(answer.content.decode())


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)).replace("\u202f", " ").replace("\u2009", " ")


def test_page_begins_with_the_form_and_the_fleets_that_operators_run(viewer: Client) -> None:
    shown = page(viewer)
    for name in ("64 x 8", "128 x 12", "256 x 12", "512 x 8"):
        assert name in shown
    assert 'name="requests_per_second" value="100"' in shown


@pytest.mark.parametrize(
    ("name", "nodes"), [("64 x 8", 64), ("128 x 12", 128), ("256 x 12", 256), ("512 x 8", 512)]
)
def test_address_of_a_fleet_holds_the_whole_question(viewer: Client, name: str, nodes: int) -> None:
    first = viewer.get(PAGE).content.decode()
    match = re.search(rf'<a class="grow" href="([^"]+)">{name}</a>', first)
    assert match
    answer = viewer.get(html.unescape(match[1]))
    shown = text_of(html.unescape(answer.content.decode()))
    assert f"{nodes} nodes of" in shown
    assert "Little's law" in shown
    assert "2 x" in shown
    assert "KV heads x 128 x 2 B" in shown


def test_registered_model_is_planned_on_an_accelerator_of_the_fleet(viewer: Client) -> None:
    make_model("tiny")
    node = make_node("n1", accelerators=2)
    card = node.accelerators.first()
    assert card is not None
    key = f"{card.memory_bytes}|{card.name or card.kind}"
    shown = text_of(page(viewer, model="tiny", engine="torch", accelerator=key, sequences="4", **LOAD))
    assert "1 node of 2 " in shown
    assert "replica_memory_bytes" in shown
    assert "Reserved by flag" in shown
    assert "cannot be planned" not in shown


def test_pasted_config_that_is_not_understood_is_refused_with_its_bound(viewer: Client) -> None:
    config = (
        '{"model_type": "newcomer", "torch_dtype": "bfloat16", "num_hidden_layers": 42, "hidden_size": 4096, '
        '"num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "compress_ratios": [4], '
        '"max_position_embeddings": 4096}'
    )
    question = {"config": config, "weights_gib": "10", "memory_gib": "80", **LOAD}
    refused = text_of(page(viewer, **question))
    assert "cannot be planned" in refused
    assert "Unsupported attention layout" in refused
    assert "84" in refused
    planned = text_of(page(viewer, **question, accept_upper_bound="on"))
    assert "cannot be planned" not in planned
    assert "86,016" in planned or "86 016" in planned


def test_model_of_unknown_size_is_refused(viewer: Client) -> None:
    Model.objects.filter(pk=make_model("model-v2").pk).update(weights_bytes=0)
    assert "size of the weights is unknown" in page(viewer, model="model-v2", memory_gib="80", **LOAD)


def test_what_does_not_fit_is_answered_with_what_would(viewer: Client) -> None:
    first = viewer.get(PAGE).content.decode()
    match = re.search(r'<a class="grow" href="([^"]+)">512 x 8</a>', first)
    assert match
    address = html.unescape(match[1]).replace("limit_tokens=4096", "limit_tokens=60000")
    shown = text_of(html.unescape(viewer.get(address).content.decode()))
    assert "What would make it fit" in shown
    assert "tensor_parallel_size = 2" in shown


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"config": "{"}, "This is no JSON"),
        ({"config": "[]"}, "This is no JSON object"),
        ({"engine_options": "nonsense"}, "is not “name = value”"),
        (
            {"engine_options": "max_model_len = long", "config": '{"model_type": "x"}'},
            "must be a positive whole",
        ),
        ({"memory_gib": "-1"}, "greater than or equal"),
        ({"memory_gib": ""}, "choose an accelerator"),
        ({"prompt_tokens": "0", "output_tokens": ""}, "greater than or equal"),
        ({"prompt_tokens": "", "output_tokens": ""}, "say how long prompts and answers are"),
        ({"model": "none such"}, "Select a valid choice"),
        ({}, "name a registered model"),
    ],
)
def test_what_cannot_be_asked_is_said_by_name(viewer: Client, query: dict[str, str], told: str) -> None:
    shown = page(viewer, **{"memory_gib": "80", **LOAD, **query})
    assert told in shown
    assert 'id="ask-errors"' in shown


def test_hostile_text_in_a_question_stays_text(viewer: Client) -> None:
    script = "<script>alert(1)</script>"
    answer = viewer.get(
        PAGE, {"config": f'{{"model_type": "{script}"}}', "weights_gib": "1", "memory_gib": "8", **LOAD}
    )
    assert script not in answer.content.decode()
    assert "cannot be planned" in answer.content.decode()


def test_options_may_be_given_as_on_a_command_line(viewer: Client) -> None:
    first = viewer.get(PAGE).content.decode()
    match = re.search(r'<a class="grow" href="([^"]+)">512 x 8</a>', first)
    assert match
    answer = viewer.get(
        html.unescape(match[1]) + "&engine_options=--kv-cache-dtype+fp8_e4m3%0A--max-model-len%3D8k"
    )
    shown = text_of(html.unescape(answer.content.decode()))
    assert "128 x 1 B" in shown
    assert "8,000" in shown or "8 000" in shown


def test_several_models_share_the_nodes_of_one_answer(viewer: Client) -> None:
    make_model("one")
    make_model("two")
    options = {"engine": "torch", "sequences": "4", "memory_gib": "8", "per_node": "2"}
    first = viewer.get(PAGE, {"model": "one", **options, **LOAD, "replicas": "30"}).content.decode()
    assert "2 nodes of 2" in text_of(html.unescape(first))
    match = re.search(r'<a class="aside" href="([^"]+)">add another model</a>', first)
    assert match
    form = viewer.get(html.unescape(match[1])).content.decode()
    assert "beside 1 that is asked for already" in form
    assert 'name="memory_gib" value="8"' in form
    held = re.search(r'<input type="hidden" name="with" value="([^"]+)">', form)
    assert held
    question = {"model": "two", **options, **LOAD, "replicas": "30", "with": html.unescape(held[1])}
    both = text_of(html.unescape(viewer.get(PAGE, question).content.decode()))
    assert "4 nodes of 2" in both
    assert "Beside it on the same 4 nodes" in both
    assert "one 30 replicas" in both


@pytest.mark.parametrize("text", ["", "prompt_tokens=x", "prompt_tokens=1&output_tokens=1", "%00=%ff"])
def test_model_beside_that_cannot_be_read_is_said(viewer: Client, text: str) -> None:
    make_model("one")
    shown = page(viewer, model="one", memory_gib="8", **LOAD, **{"with": text})
    assert "start over" in shown or "name a registered model" in shown
