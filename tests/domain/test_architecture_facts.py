"""What config.json says about a model, for people."""

from __future__ import annotations

from typing import Any

import pytest

from exaserve_ops.serving.domain.architecture import (
    Architecture,
    UnknownArchitectureError,
    read_architecture,
)
from exaserve_ops.serving.domain.kv_bytes import KvBytes, kv_bytes_of
from exaserve_ops.serving.domain.manifest import FileEntry, revision_of

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


def test_facts_of_a_plain_model_are_read() -> None:
    assert read_architecture(LLAMA_8B) == Architecture(
        "llama", 32, 4096, 32, 8, 128, 128256, 8192, "bfloat16"
    )


def test_heads_without_grouping_each_have_their_own_keys() -> None:
    plain = {k: v for k, v in LLAMA_8B.items() if k != "num_key_value_heads"}
    assert read_architecture(plain).kv_heads == 32


def test_newer_spelling_of_the_type_wins() -> None:
    assert read_architecture(LLAMA_8B | {"dtype": "float32"}).dtype == "float32"


def test_facts_of_a_nested_model_are_those_of_its_language_model() -> None:
    nested = {"model_type": "llava", "text_config": LLAMA_8B, "vision_config": {"num_hidden_layers": 24}}
    assert read_architecture(nested) == read_architecture(LLAMA_8B)


def test_model_without_attention_has_no_heads() -> None:
    facts = read_architecture({"model_type": "mamba", "num_hidden_layers": 48, "hidden_size": 1536})
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (48, 0, 0, 0)


def test_family_whose_memory_is_not_known_has_facts_all_the_same() -> None:
    facts = read_architecture(LLAMA_8B | {"model_type": "newcomer", "compress_ratios": [4]})
    assert (facts.family, facts.layers) == ("newcomer", 32)


def test_config_of_a_model_that_is_only_described_means_the_same_memory() -> None:
    facts = read_architecture(LLAMA_8B)
    described = kv_bytes_of(facts.as_config())
    assert isinstance(described, KvBytes)
    assert described.growth_bytes_per_token == 131_072
    assert read_architecture(facts.as_config()) == facts


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": ""}, "model_type"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size"),
    ],
)
def test_config_of_no_language_model_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnknownArchitectureError, match=named):
        read_architecture(LLAMA_8B | change)


def test_digest_names_bytes_and_paths_whatever_their_order() -> None:
    a, b = FileEntry("a", 1, "11"), FileEntry("b", 2, "22")
    assert revision_of([a, b]) == revision_of([b, a])
    assert revision_of([a]) != revision_of([FileEntry("A", 1, "11")])
    assert revision_of([a]) != revision_of([FileEntry("a", 1, "12")])
    assert revision_of([a]) != revision_of([FileEntry("a", 2, "11")])
