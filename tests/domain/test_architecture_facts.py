"""config.json of known families is read, of others refused; memory is computed, never guessed."""

from __future__ import annotations

from typing import Any

import pytest

from exaserve_ops.serving.domain.architecture import UnknownArchitectureError, read_architecture
from exaserve_ops.serving.domain.manifest import FileEntry, manifest_digest

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def test_kv_bytes_of_a_known_model() -> None:
    facts = read_architecture(LLAMA_8B)
    assert facts.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131_072
    assert facts.head_dim == 128


def test_heads_without_grouping_each_have_their_own_keys() -> None:
    plain = {k: v for k, v in LLAMA_8B.items() if k != "num_key_value_heads"}
    assert read_architecture(plain).kv_heads == 32


def test_head_dimension_of_its_own_is_believed() -> None:
    assert read_architecture(LLAMA_8B | {"head_dim": 64}).kv_bytes_per_token == 65_536


def test_newer_spelling_of_the_type_wins() -> None:
    assert read_architecture(LLAMA_8B | {"dtype": "float32"}).kv_bytes_per_token == 262_144


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"model_type": ""}, "model_type"),
        ({"torch_dtype": "int3"}, "int3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnknownArchitectureError, match=named):
        read_architecture(LLAMA_8B | change)


def test_digest_names_bytes_and_paths_whatever_their_order() -> None:
    a, b = FileEntry("a", 1, "11"), FileEntry("b", 2, "22")
    assert manifest_digest([a, b]) == manifest_digest([b, a])
    assert manifest_digest([a]) != manifest_digest([FileEntry("A", 1, "11")])
    assert manifest_digest([a]) != manifest_digest([FileEntry("a", 1, "12")])
    assert manifest_digest([a]) != manifest_digest([FileEntry("a", 2, "11")])
