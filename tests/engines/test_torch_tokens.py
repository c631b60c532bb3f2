"""The built-in engine's greedy tokens equal transformers' on the same weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.engines.reference import Bench, Prompt
from workers.engines.torch_engine.scheduler import Chunk, SchedulerLimits, Sequence

ROOMY = SchedulerLimits(max_sequences=16, max_batched_tokens=512)

_SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR: dict[str, Any] = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
_DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN_FULL: dict[str, Any] = {
    **_YARN,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "truncate": False,
}
_SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 21}

VARIANTS: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "llama_llama3_rope": (LlamaForCausalLM, LlamaConfig(**_SMALL, rope_parameters=_LLAMA3)),
    "llama_linear_rope_tied_biased": (
        LlamaForCausalLM,
        LlamaConfig(**_SMALL, rope_parameters=_LINEAR, tie_word_embeddings=True, attention_bias=True),
    ),
    "llama_explicit_head_size": (LlamaForCausalLM, LlamaConfig(**_SMALL, head_dim=24)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SMALL, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SMALL, head_dim=32)),
    "llama_dynamic_rope": (LlamaForCausalLM, LlamaConfig(**_SMALL, rope_parameters=_DYNAMIC)),
    "llama_yarn_rope": (LlamaForCausalLM, LlamaConfig(**_SMALL, rope_parameters=_YARN)),
    "qwen3_yarn_rope": (Qwen3ForCausalLM, Qwen3Config(**_SMALL, head_dim=32, rope_parameters=_YARN_FULL)),
    "qwen2_window_in_upper_layers": (
        Qwen2ForCausalLM,
        Qwen2Config(**_SMALL, **_SLIDING, max_window_layers=1),
    ),
    "qwen3_window_in_named_layers": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **_SMALL,
            **_SLIDING,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "mistral_window": (MistralForCausalLM, MistralConfig(**_SMALL, sliding_window=16)),
    "mistral_without_window": (MistralForCausalLM, MistralConfig(**_SMALL, sliding_window=None)),
}


@pytest.fixture(scope="module")
def bench(demo_model: Path) -> Bench:
    return Bench(demo_model)


def prompts_of(vocabulary: int, lengths: list[int], *, seed: int = 0) -> list[Prompt]:
    numbers = random.Random(seed)  # noqa: S311 - test data
    return [Prompt(tuple(numbers.randrange(vocabulary) for _ in range(n)), 12) for n in lengths]


def test_demo_model_alone_and_in_a_batch(bench: Bench) -> None:
    prompts = prompts_of(bench.vocabulary_size, [1, 5, 16, 17, 40, 100])
    together = bench.run(prompts, ROOMY)
    for prompt, generated in zip(prompts, together.generated, strict=True):
        bench.assert_greedy(prompt, generated)
        assert bench.run([prompt], ROOMY).generated == [generated]


def test_tokens_equal_what_transformers_generates(bench: Bench) -> None:
    (prompt,) = prompts_of(bench.vocabulary_size, [20])
    whole = torch.tensor([prompt.tokens])
    expected = bench.reference.generate(
        whole, attention_mask=torch.ones_like(whole), max_new_tokens=12, do_sample=False
    )
    (generated,) = bench.run([prompt], ROOMY).generated
    assert generated == expected[0, 20:].tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_family_member_and_spelling(name: str, tmp_path: Path) -> None:
    kind, config = VARIANTS[name]
    torch.manual_seed(3)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which start as 0 and 1
            parameter.normal_(std=0.3)
    # Small shards, so that the index file is read too.
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    variant = Bench(tmp_path)
    prompts = prompts_of(variant.vocabulary_size, [3, 30, 90])
    outcome = variant.run(prompts, SchedulerLimits(4, 32))
    for prompt, generated in zip(prompts, outcome.generated, strict=True):
        variant.assert_greedy(prompt, generated)


@pytest.mark.parametrize(
    "name",
    ["llama_llama3_rope", "llama_linear_rope_tied_biased", "qwen2", "qwen3", "qwen2_window_in_upper_layers"],
)
def test_shared_weights_compute_bit_for_bit_what_private_ones_do(name: str, tmp_path: Path) -> None:
    kind, config = VARIANTS[name]
    torch.manual_seed(3)
    kind(config).save_pretrained(tmp_path)
    variant = Bench(tmp_path)
    chunks = [
        Chunk(
            Sequence(str(n), list(prompt.tokens), blocks=[4 * n, 4 * n + 1, 4 * n + 2]), 0, len(prompt.tokens)
        )
        for n, prompt in enumerate(prompts_of(variant.vocabulary_size, [1, 17, 40, 48]))
    ]
    logits = {
        packed: decoder.forward(decoder.lay_out(chunks))
        for packed in (True, False)
        for decoder in [variant.decoder_on_shared_weights(tmp_path / "shared", packed=packed)]
    }
    own = variant.decoder.forward(variant.decoder.lay_out(chunks))
    assert torch.equal(logits[True], own)
    torch.testing.assert_close(logits[False], own)


def test_prefix_hit_changes_no_token(bench: Bench) -> None:
    (first,) = prompts_of(bench.vocabulary_size, [50])
    (cold,) = bench.run([first], ROOMY).generated
    again = Prompt(first.tokens, 12, arrives_at_step=20)
    longer = Prompt((*first.tokens, *cold, 7, 8, 9), 12, arrives_at_step=40)
    outcome = bench.run([first, again, longer], ROOMY)
    assert outcome.generated[:2] == [cold, cold]
    # 50 + 12 tokens: the prompt's full blocks, then those with generated text in them too.
    assert outcome.cached_tokens == [0, 48, 48]
    bench.assert_greedy(longer, outcome.generated[2])


def test_prompt_that_is_wholly_in_cache_still_computes_its_last_token(bench: Bench) -> None:
    (first,) = prompts_of(bench.vocabulary_size, [48])
    outcome = bench.run([first, Prompt(first.tokens, 12, arrives_at_step=20)], ROOMY)
    assert outcome.cached_tokens == [0, 32]
    assert outcome.generated[0] == outcome.generated[1]
    bench.assert_greedy(first, outcome.generated[1])


def test_generated_text_is_reused_by_the_next_turn(bench: Bench) -> None:
    (first,) = prompts_of(bench.vocabulary_size, [40])
    long_first = Prompt(first.tokens, 30)
    (answer,) = bench.run([long_first], ROOMY).generated
    second = Prompt((*first.tokens, *answer, 1, 2, 3), 4, arrives_at_step=60)
    outcome = bench.run([long_first, second], ROOMY)
    assert outcome.cached_tokens[1] == 64  # of 40 + 30 tokens, 69 were computed


def test_preemption_changes_no_token(bench: Bench) -> None:
    prompts = [Prompt(p.tokens, 60) for p in prompts_of(bench.vocabulary_size, [20] * 4)]
    outcome = bench.run(prompts, ROOMY, blocks=11)
    assert outcome.preemptions > 0
    for prompt, generated in zip(prompts, outcome.generated, strict=True):
        bench.assert_greedy(prompt, generated)


PROMPT = st.builds(
    lambda stem, tail, length, step: Prompt((*range(10, 10 + stem), *tail), length, step),
    stem=st.sampled_from([0, 15, 16, 33, 70]),
    tail=st.lists(st.integers(0, 1000), min_size=1, max_size=20),
    length=st.integers(1, 24),
    step=st.integers(0, 12),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    prompts=st.lists(PROMPT, min_size=1, max_size=7),
    sequences=st.integers(1, 6),
    spare_tokens=st.integers(0, 60),
    blocks=st.integers(8, 40),
)
def test_no_schedule_changes_a_token(
    bench: Bench, prompts: list[Prompt], sequences: int, spare_tokens: int, blocks: int
) -> None:
    limits = SchedulerLimits(sequences, sequences + spare_tokens)
    outcome = bench.run(prompts, limits, blocks=blocks)
    for prompt, generated in zip(prompts, outcome.generated, strict=True):
        bench.assert_greedy(prompt, generated)
