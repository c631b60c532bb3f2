"""What is recorded of a model's folder: its size by its files, its memory by its config, or why not."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from exaserve_ops.adapters.model_folder import ModelFolder
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.kv_bytes import KvBytes, kv_bytes_of
from exaserve_ops.serving.models import Model
from exaserve_ops.serving.services.deployments import DeploymentWish, create_deployment
from exaserve_ops.serving.services.models import register_model
from tests.fakes.world import NOW, make_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}
NAME = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"


def weights(path: Path, elements: int) -> int:
    """Write a safetensors file of bfloat16 numbers; returns its size."""
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [elements], "data_offsets": [0, 2 * elements]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(2 * elements))
    return path.stat().st_size


def folder(path: Path, config: dict[str, Any] | str, *files: str) -> int:
    """Write a model; returns the size of its weights."""
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "config.json").write_text(text)
    (path / "tokenizer.json").write_text("{}")
    return sum(weights(path / name, 100 + place) for place, name in enumerate(files))


def registered(path: Path, name: str = "m") -> Model:
    return register_model(name=name, facts=ModelFolder().read(str(path)), actor="test", now=NOW)


@pytest.mark.django_db
def test_model_of_a_new_family_is_recorded_without_a_guess_at_its_cache(tmp_path: Path) -> None:
    folder(tmp_path, LLAMA | {"model_type": "newcomer", "compress_ratios": [4, 128]}, "model.safetensors")
    model = registered(tmp_path)
    assert model.kv_bytes_per_token is None
    assert model.architecture["family"] == "newcomer"
    wish = DeploymentWish("chat", model.pk, 1, "torch")
    assert create_deployment(wish, actor="test", now=NOW).replica_memory_bytes == 0, "not placed by a guess"


@pytest.mark.django_db
def test_config_is_kept_for_planning_and_windows_are_in_the_default_memory(tmp_path: Path) -> None:
    size = folder(tmp_path, LLAMA | {"model_type": "mistral", "sliding_window": 256}, "model.safetensors")
    model = registered(tmp_path)
    assert model.config["sliding_window"] == 256
    assert model.kv_bytes_per_token == 0
    # Others cap such layers; the built-in engine keeps all 2,048 tokens.
    for engine, tokens in (("simulated", 256), ("torch", 2048)):
        made = create_deployment(DeploymentWish(engine, model.pk, 1, engine), actor="test", now=NOW)
        assert made.replica_memory_bytes == (size + 4 * tokens * 2 * 2 * 2 * 16 * 2) * 5 // 4


@pytest.mark.django_db
def test_weights_are_counted_once_though_they_lie_there_twice(tmp_path: Path) -> None:
    size = folder(tmp_path, LLAMA, NAME, OTHER)
    weights(tmp_path / "consolidated.safetensors", 201)
    assert registered(tmp_path).weights_bytes == size
    index = {"metadata": {"total_size": 402}, "weight_map": {"a": NAME, "b": OTHER}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert registered(tmp_path, "indexed").weights_bytes == size


def test_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder(tmp_path, LLAMA, NAME)
    index = {"weight_map": {"a": NAME, "b": OTHER}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInputError, match=OTHER):
        ModelFolder().read(str(tmp_path))


@pytest.mark.django_db
def test_numbers_without_end_in_a_config_can_be_kept(tmp_path: Path) -> None:
    text = json.dumps(LLAMA)[:-1] + ', "time_step_limit": [0.0, Infinity], "bad": NaN}'
    folder(tmp_path, text, "model.safetensors")
    assert registered(tmp_path).config["time_step_limit"] == [0.0, "Infinity"]


@pytest.mark.parametrize(
    "text", ["[]", '{"model_type": "a\\u0000"}', json.dumps(LLAMA | {"x": "\ud800"}), "{", "[" * 100_000]
)
def test_config_that_no_database_holds_is_refused(tmp_path: Path, text: str) -> None:
    folder(tmp_path, text, "model.safetensors")
    with pytest.raises(InvalidInputError, match=r"config\.json"):
        ModelFolder().read(str(tmp_path))


@pytest.mark.django_db
def test_model_recorded_before_configs_were_kept_is_planned_by_its_facts() -> None:
    model = make_model("old")
    Model.objects.filter(pk=model.pk).update(config={})
    model.refresh_from_db()
    found = kv_bytes_of(model.planning_config)
    assert isinstance(found, KvBytes)
    assert found.growth_bytes_per_token == model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    Model.objects.filter(pk=model.pk).update(architecture={})
    model.refresh_from_db()
    assert model.planning_config == {}
