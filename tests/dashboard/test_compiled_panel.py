"""The weights page says what was compiled beside a model, and who may change it does so there."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.test import Client
from django.urls import reverse

from exaserve_ops.serving.models import CompiledSet, Model
from exaserve_ops.weights.domain.held import HeldWeights, StoreSight
from exaserve_ops.weights.services import record_sight
from tests.fakes.world import NOW, make_node

pytestmark = pytest.mark.django_db


@pytest.fixture
def model(stored_model: Model) -> Model:
    return stored_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cache" / "triton").mkdir(parents=True)
    (tmp_path / "cache" / "triton" / "k.cubin").write_bytes(b"cubin")
    return tmp_path / "cache"


def page(client: Client, model: Model) -> str:
    return client.get(reverse("weights_of_model", args=[model.pk])).content.decode()


def test_a_folder_is_registered_shown_with_its_nodes_and_removed(
    operator: Client, viewer: Client, model: Model, folder: Path
) -> None:
    assert "engines compile for themselves" in page(viewer, model)
    address = reverse("weights_compiled", args=[model.pk])
    asked = {"engine": "vllm", "hardware": "NVIDIA H200", "path": str(folder), "reason": "fast launches"}
    text = operator.post(address, asked, follow=True).content.decode()
    assert "1 file goes to nodes with stored and NVIDIA H200." in text
    found = CompiledSet.objects.get()
    for name, state in (("c1", "ready"), ("c2", "failed")):
        held = HeldWeights(found.digest, state, 5, 5, wanted=True)
        record_sight(make_node(name).pk, StoreSight(1, held=(held,)), names={}, now=NOW)
    text = page(viewer, model)
    assert "NVIDIA H200" in text
    assert "1 failed" in text
    assert "Remove" not in text
    assert "Register a folder" not in text
    remove = reverse("weights_compiled_remove", args=[model.pk, found.pk])
    assert "Not done: say why" in operator.post(remove, follow=True).content.decode()
    text = operator.post(remove, {"reason": "stale"}, follow=True).content.decode()
    assert "copies in engines&#x27; caches on nodes stay" in text
    assert "removed already" in operator.post(remove, {"reason": "x"}, follow=True).content.decode()
    assert not CompiledSet.objects.exists()


def test_what_is_wrong_with_a_folder_is_said_and_nothing_is_registered(
    operator: Client, viewer: Client, model: Model, folder: Path
) -> None:
    address = reverse("weights_compiled", args=[model.pk])
    asked = {"engine": "vllm", "hardware": "", "path": str(folder), "reason": "x"}
    for changes, told in (
        ({"path": "/nowhere/at/all"}, "there is no folder &#x27;/nowhere/at/all&#x27; on this machine"),
        ({"engine": "../x"}, "small letters"),
        ({"origins": "one-word"}, "is not kind, address"),
        ({"reason": ""}, "required"),
    ):
        text = operator.post(address, asked | changes, follow=True).content.decode()
        assert told in text, changes
    assert viewer.post(address, asked).status_code == 403
    assert not CompiledSet.objects.exists()
