"""Laws that hold for KV bytes of every layout."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exaserve_ops.serving.domain.context_length import context_length
from exaserve_ops.serving.domain.kv_bytes import KvBytes, KvOptions, kv_bytes, kv_bytes_of
from exaserve_ops.serving.domain.kv_families import FAMILIES
from exaserve_ops.serving.domain.kv_layout import (
    FULL,
    LATENT,
    RECURRENT,
    SLIDING,
    KvLayout,
    LayerMemory,
    StatePart,
    UnknownLayout,
)

COUNTS = st.sampled_from([1, 2, 4, 8, 16])
WAYS = st.sampled_from([1, 2, 4, 8])
TYPES = st.sampled_from(["auto", "fp8", "bfloat16", "float32", "nvfp4", "q8_0", "int8"])
TOKENS = st.integers(0, 2_000_000)


@st.composite
def layers(draw: st.DrawFn) -> LayerMemory:
    kind = draw(st.sampled_from([FULL, SLIDING, LATENT, RECURRENT]))
    size = draw(st.sampled_from([64, 128, 192, 256]))
    if kind == LATENT:
        return LayerMemory(LATENT, 1, 512 + 64, 512, is_split=False)
    if kind == RECURRENT:
        return LayerMemory(RECURRENT, state=(StatePart("state", draw(COUNTS) * 8, size, 4),))
    window = draw(st.integers(1, 8192)) if kind == SLIDING else None
    return LayerMemory(kind, draw(COUNTS), 2 * size, size, window_tokens=window)


LAYOUTS = st.builds(
    KvLayout,
    model_type=st.just("made"),
    layers=st.lists(layers(), min_size=1, max_size=12).map(tuple),
    attention_heads=st.just(64),
    hidden=st.just(4096),
    intermediate=st.just(11008),
    vocabulary=st.just(32000),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)


def made(layout: KvLayout, **options: Any) -> KvBytes:
    found = kv_bytes(layout, KvOptions(**options))
    assert isinstance(found, KvBytes)
    return found


@given(LAYOUTS, WAYS, TYPES, TOKENS, TOKENS)
def test_longer_sequences_never_take_less_and_nothing_is_negative(
    layout: KvLayout, ways: int, dtype: str, one: int, other: int
) -> None:
    found = made(layout, tensor_parallel=ways, kv_dtype=dtype)
    shorter, longer = sorted((one, other))
    for block in (1, 16):
        small, large = (found.bytes_each(n, block_tokens=block) for n in (shorter, longer))
        assert 0 <= small <= large


@given(LAYOUTS, WAYS, TOKENS)
def test_splitting_never_saves_more_than_its_share_and_never_costs(
    layout: KvLayout, ways: int, tokens: int
) -> None:
    whole, split = made(layout), made(layout, tensor_parallel=ways)
    assert split.whole == whole.whole
    assert whole.whole.bytes_at(tokens) <= ways * split.bytes_each(tokens)
    assert split.bytes_each(tokens) <= whole.bytes_each(tokens)


@given(st.integers(1, 80), WAYS, TOKENS)
def test_latent_attention_is_never_divided(count: int, ways: int, tokens: int) -> None:
    latent = LayerMemory(LATENT, 1, 576, 512, is_split=False)
    layout = KvLayout("made", (latent,) * count, 64, 4096, 11008, 32000, "bfloat16")
    assert made(layout, tensor_parallel=ways).bytes_each(tokens) == made(layout).bytes_each(tokens)


@given(LAYOUTS, WAYS, TOKENS)
def test_windows_never_hold_more_than_layers_without(layout: KvLayout, ways: int, tokens: int) -> None:
    capped = made(layout, tensor_parallel=ways)
    off = made(layout, tensor_parallel=ways, windows_off=True)
    assert capped.bytes_each(tokens) <= off.bytes_each(tokens)
    assert not off.whole.windows


@given(LAYOUTS, TOKENS)
def test_narrower_numbers_never_take_more(layout: KvLayout, tokens: int) -> None:
    sizes = [made(layout, kv_dtype=name).bytes_each(tokens) for name in ("fp8", "bfloat16", "float32")]
    assert sizes == sorted(sizes)


@given(LAYOUTS, st.integers(1, 4), TOKENS)
def test_pipeline_stages_together_hold_the_whole_model(layout: KvLayout, stages: int, tokens: int) -> None:
    staged = made(layout, pipeline_parallel=stages)
    assert len(staged.each) == stages
    assert sum(share.bytes_at(tokens) for share in staged.each) == staged.whole.bytes_at(tokens)


@given(LAYOUTS, st.integers(0, 1 << 40), st.sampled_from([1, 16]))
def test_longest_sequence_within_a_budget_is_the_longest(layout: KvLayout, budget: int, block: int) -> None:
    found = made(layout)
    most = found.tokens_within(budget, at_most=100_000, block_tokens=block)
    if most:
        assert found.bytes_each(most, block_tokens=block) <= budget
    if most < 100_000:
        assert found.bytes_each(most + 1, block_tokens=block) > budget


NAMES = st.sampled_from(
    ["model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
     "hidden_size", "sliding_window", "layer_types", "text_config", "torch_dtype", "multi_query",
     "kv_lora_rank", "quantization_config", "full_attention_interval", "compress_ratios", "max_window_layers",
     "attention_chunk_size", "sliding_window_pattern", "linear_attn_config", "attn_layer_indices",
     "num_kv_shared_layers", "use_sliding_window", "full_attn_layers", "attn_config", "factor",
     "hybrid_override_pattern", "attn_layer_offset", "mamba_d_state", "num_nextn_predict_layers",
     "global_head_dim", "index_head_dim",
     "num_heads", "max_position_embeddings", "rope_scaling", "no_rope_layers", "kv_cache_scheme", "num_bits"]
)  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-4, 4096)
    | st.sampled_from([10**9, 10**4000])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([*sorted(FAMILIES), "bfloat16", "gemma3", ""])
    | st.lists(st.sampled_from(["full_attention", "sliding_attention", "x"]), max_size=4),
    lambda inner: st.dictionaries(NAMES, inner, max_size=8),
    max_leaves=30,
)


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(NAMES, VALUES, max_size=20))
def test_no_config_whatever_breaks_the_reader(family: str, config: dict[str, Any]) -> None:
    found = kv_bytes_of({"model_type": family} | config)
    length = context_length(config, asked_tokens=None)
    assert length.tokens is None or length.tokens >= 0
    if isinstance(found, UnknownLayout):
        assert found.reason
        assert found.upper_bound_bytes_per_token is None or found.upper_bound_bytes_per_token > 0
    else:
        assert found.whole.growth_bytes_per_token >= 0
        assert found.bytes_each(1000) > 0
