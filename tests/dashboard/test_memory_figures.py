"""Three numbers of a deployment's memory, and the arithmetic of a model's KV bytes."""

from __future__ import annotations

import html
import re
from typing import Any
from uuid import UUID

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.placement import Placement
from exaserve_ops.serving.models import Deployment, Model, Replica
from exaserve_ops.serving.services.replicas import create_replicas, place_replica
from tests.dashboard.conftest import MemoryReader
from tests.fakes.world import GIB, NOW, make_deployment, make_model, make_node

CHAT = "chat"


def text_of(client: Client, name: str, pk: UUID) -> str:
    answer = client.get(reverse(name, args=[pk]))
    assert answer.status_code == 200
    plain = re.sub(r"<[^>]+>", " ", html.unescape(answer.content.decode()))
    return re.sub(r"\s+", " ", plain).replace("\u202f", " ").replace("\u2009", " ")


@pytest.fixture
def placed(db: None) -> tuple[Deployment, Replica]:  # noqa: ARG001 - opens the database
    deployment = make_deployment(CHAT, replicas=1)
    node = make_node("n1", accelerators=1)
    card = node.accelerators.get()
    replica = create_replicas(deployment.pk, 1, why="one", actor="test", now=NOW)[0]
    to = Placement(str(node.pk), node.name, (card.uuid,), "there is room")
    place_replica(replica.pk, to, actor="test", now=NOW)
    replica.refresh_from_db()
    return deployment, replica


def tell(reader: MemoryReader, replica: Replica, used_bytes: int | None, *, age_seconds: float = 0.0) -> None:
    reader.nodes[str(replica.node_id)] = {
        "received_at": clock.unix_seconds() - age_seconds,
        "replicas": {str(replica.pk): {"state": "ready", "memory_used_bytes": used_bytes, "load": None}},
    }


def test_needed_reserved_and_observed_are_told_apart(
    viewer: Client, reader: MemoryReader, placed: tuple[Deployment, Replica]
) -> None:
    deployment, replica = placed
    tell(reader, replica, GIB + (100 << 20))  # an interpreter's libraries are no alarm
    shown = text_of(viewer, "deployment_memory", deployment.pk)
    assert "Needed" in shown
    assert "Reserved 1 GiB" in shown
    assert f"Observed 1.10 GiB at most, by {replica.name}" in shown
    assert "more memory than is reserved" not in shown
    assert (
        reverse("deployment_memory", args=[deployment.pk])
        in viewer.get(reverse("deployment", args=[deployment.pk])).content.decode()
    )


def test_replica_that_takes_more_than_is_reserved_is_told_by_how_much(
    viewer: Client, reader: MemoryReader, placed: tuple[Deployment, Replica]
) -> None:
    deployment, replica = placed
    tell(reader, replica, GIB + (300 << 20))
    shown = text_of(viewer, "deployment_memory", deployment.pk)
    assert "1 replica takes more memory than is reserved" in shown
    assert f"{replica.name} by 300 MiB" in shown


@pytest.mark.parametrize(("used", "age"), [(None, 0.0), (2 * GIB, 60.0)])
def test_what_nobody_told_lately_is_not_known_and_no_alarm(
    viewer: Client, reader: MemoryReader, placed: tuple[Deployment, Replica], used: int | None, age: float
) -> None:
    deployment, replica = placed
    tell(reader, replica, used, age_seconds=age)
    shown = text_of(viewer, "deployment_memory", deployment.pk)
    assert "Observed not known" in shown
    assert "more memory than is reserved" not in shown


def test_number_in_an_engines_error_is_offered_on_the_page(
    viewer: Client, placed: tuple[Deployment, Replica]
) -> None:
    deployment, replica = placed
    line = (
        "ValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be "
        "stored in KV cache (23,648). Try increasing `gpu_memory_utilization`"
    )
    Replica.objects.filter(pk=replica.pk).update(exit_log_tail=["loading", line])
    shown = text_of(viewer, "deployment_memory", deployment.pk)
    assert "ended for want of memory" in shown
    assert "max_model_len = 23648" in shown


def test_engine_whose_rules_are_not_known_says_so(viewer: Client, placed: tuple[Deployment, Replica]) -> None:
    deployment, _ = placed
    Deployment.objects.filter(pk=deployment.pk).update(engine="simulated")
    shown = text_of(viewer, "deployment_memory", deployment.pk)
    assert "Needed not known" in shown
    assert "memory rules are known of".capitalize() in shown
    assert "Reserved 1 GiB" in shown


def test_page_of_a_model_shows_how_its_kv_bytes_come_about(viewer: Client) -> None:
    model = make_model("tiny")
    shown = text_of(viewer, "model", model.pk)
    assert "2 x 2 layers x 2 KV heads x 16 x 4 B" in shown
    assert "Each further token 512 B" in shown


def test_page_of_a_model_of_unknown_layout_says_why_and_guesses_nothing(viewer: Client) -> None:
    model = make_model("newcomer")
    config: dict[str, Any] = {**model.config, "model_type": "newcomer", "compress_ratios": [4]}
    Model.objects.filter(pk=model.pk).update(config=config, kv_bytes_per_token=None)
    shown = text_of(viewer, "model", model.pk)
    assert "How much KV memory it takes is not known" in shown
    assert "KV per token not known" in shown
    assert "upper bound 512 bytes a token" in shown


def test_link_from_a_model_leads_to_a_form_that_names_it(viewer: Client) -> None:
    make_model("tiny")
    shown = viewer.get(reverse("capacity"), {"model": "tiny", "engine": "torch"}).content.decode()
    assert '<option value="tiny" selected>' in shown
    assert '<option value="torch" selected>' in shown
    assert "Fill in what you know" in shown
