"""How each family of models keeps keys and values: one reader for each way, and who reads how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from exaserve_ops.serving.domain.config_fields import Fields, LayoutError, within_layers
from exaserve_ops.serving.domain.kv_layout import CHUNKED, FULL, LATENT, NOTHING, SLIDING, LayerMemory
from exaserve_ops.serving.domain.kv_recurrent import (
    delta_attention_state,
    delta_net_state,
    mamba2_state,
    mamba_state,
    short_convolution_state,
)

Reader = Callable[[Fields], tuple[LayerMemory, ...]]

INDEX_ELEMENTS = 128
INDEX_BYTES_PER_TOKEN = INDEX_ELEMENTS + 4
"""Index of sparse latent attention: numbers in fp8 and a 4-byte scale, of each token and layer."""

_FULL_KINDS = frozenset({"full_attention", "attention", "global_attention"})
_SLIDING_KINDS = frozenset({"sliding_attention", "local_attention"})
_CHUNKED_KINDS = frozenset({"chunked_attention"})
_RECURRENT_KINDS = frozenset({"linear_attention", "mamba", "conv", "short_conv"})
_IDLE_KINDS = frozenset({"mlp", "moe"})


@dataclass(frozen=True, slots=True)
class Family:
    """How models of one `model_type` are read."""

    read: Reader
    understands: frozenset[str] = frozenset()
    """Fields that change the layout and that the reader takes into account."""
    draft_layers: int = 0
    """Layers for multi-token prediction that the class has where the config does not say."""
    cache_default: str = ""
    """Element type of the cache that engines choose for it by themselves."""


def attention_layer(fields: Fields, kind: str = FULL, window: int | None = None) -> LayerMemory:
    """Grouped-query attention: keys and values of each KV head."""
    size = fields.head_dim()
    return LayerMemory(kind, fields.kv_heads(), elements=2 * size, key_elements=size, window_tokens=window)


def _plain(fields: Fields) -> tuple[LayerMemory, ...]:
    """Every layer keeps all tokens."""
    return (attention_layer(fields),) * fields.layers()


def _every_layer_slides(fields: Fields) -> tuple[LayerMemory, ...]:
    window = fields.window_tokens()
    return _by_kind(fields, window, lambda _: window is not None)


def _slides_if_switched_on(fields: Fields) -> tuple[LayerMemory, ...]:
    """A window may stand in the config and be off: it counts from `max_window_layers` on, if it is on."""
    if not fields.is_set("use_sliding_window"):
        return _plain(fields)
    start = fields.count("max_window_layers", 28)
    return _by_kind(fields, fields.window_tokens(), lambda layer: layer >= start)


def _slides_as_listed(fields: Fields) -> tuple[LayerMemory, ...]:
    """As above, but the rule differs from version to version: the layers must be listed."""
    if not fields.is_set("use_sliding_window"):
        return _plain(fields)
    if fields.raw("layer_types") is None:
        raise LayoutError("'use_sliding_window' is on, and 'layer_types' does not say for which layers")
    return _by_kind(fields, fields.window_tokens(), lambda _: False)


def _every_nth_is_full(default: int) -> Reader:
    def read(fields: Fields) -> tuple[LayerMemory, ...]:
        letters = fields.raw("sliding_window_pattern")
        if isinstance(letters, str) and letters:  # such as LLLG
            return _by_kind(
                fields, fields.window_tokens(), lambda layer: letters[layer % len(letters)] != "G"
            )
        every = fields.optional(("sliding_window_pattern", "_sliding_window_pattern")) or default
        return _by_kind(fields, fields.window_tokens(), lambda layer: bool((layer + 1) % every))

    return read


def _two_shapes(fields: Fields) -> tuple[LayerMemory, ...]:
    """Gemma 4: layers that see everything have fewer and wider heads than those that slide."""
    layers = list(_every_nth_is_full(6)(fields))
    if fields.raw("layer_types") is None and layers[-1].kind != FULL:
        layers[-1] = attention_layer(fields)
    size = fields.whole(("global_head_dim",), 512)
    heads = fields.optional(("num_global_key_value_heads",))
    if heads is None or fields.raw("attention_k_eq_v") is False:
        heads = fields.kv_heads()
    if fields.is_set("attention_k_eq_v"):
        fields.assume("attention_k_eq_v", "keys that are also values are counted twice: an upper figure")
    wide = LayerMemory(FULL, heads, elements=2 * size, key_elements=size)
    return _shared_layers_hold_nothing(fields, [wide if x.kind == FULL else x for x in layers])


def _last_layers_share(fields: Fields) -> tuple[LayerMemory, ...]:
    return _shared_layers_hold_nothing(fields, list(_every_nth_is_full(5)(fields)))


def _shared_layers_hold_nothing(fields: Fields, layers: list[LayerMemory]) -> tuple[LayerMemory, ...]:
    """The last layers may read what earlier ones keep."""
    shared = fields.count("num_kv_shared_layers", 0)
    keep = len(layers) - shared
    if keep < 0:
        raise LayoutError(f"num_kv_shared_layers is {shared}, of {len(layers)} layers")
    return tuple(layers[:keep]) + (LayerMemory(NOTHING),) * (len(layers) - keep)


def _chunked(fields: Fields) -> tuple[LayerMemory, ...]:
    """Llama 4: local layers keep one chunk; every fourth sees everything and rotates nothing."""
    chunk = fields.whole(("attention_chunk_size",), 8192)
    no_rope = fields.raw("no_rope_layers")
    if isinstance(no_rope, list) and len(no_rope) == fields.layers():
        # Despite its name it marks the layers that do rotate: those are the local ones.
        local = [bool(rotates) for rotates in no_rope]
        return _by_kind(fields, chunk, lambda layer: local[layer], CHUNKED)
    interval = fields.optional(("no_rope_layer_interval",)) or 4
    return _by_kind(fields, chunk, lambda layer: bool((layer + 1) % interval), CHUNKED)


def _latent_layer(fields: Fields) -> LayerMemory:
    """One compressed row for all heads, and one rotated key beside it: once, and not split."""
    rank = fields.whole(("kv_lora_rank",), 512)
    rope = fields.whole(("qk_rope_head_dim",), 64)
    return LayerMemory(LATENT, 1, elements=rank + rope, key_elements=rank, is_split=False)


def _latent(fields: Fields) -> tuple[LayerMemory, ...]:
    return (_latent_layer(fields),) * fields.layers()


def _latent_twice(fields: Fields) -> tuple[LayerMemory, ...]:
    """LongCat: each layer has two attentions."""
    return (_latent_layer(fields),) * within_layers(2 * fields.whole(("num_layers", "num_hidden_layers"), 28))


def _latent_with_index(fields: Fields) -> tuple[LayerMemory, ...]:
    size = fields.whole(("index_head_dim",), INDEX_ELEMENTS)
    if size != INDEX_ELEMENTS:
        raise LayoutError(f"an index of {size} numbers a token (index_head_dim), where 128 are known")
    plain = _latent_layer(fields)
    layer = LayerMemory(
        LATENT,
        plain.heads,
        elements=plain.elements,
        key_elements=plain.key_elements,
        is_split=False,
        index_bytes=INDEX_BYTES_PER_TOKEN,
    )
    return (layer,) * fields.layers()


def _hybrid(state: Callable[[Fields], LayerMemory], interval: int | None) -> Reader:
    """Full attention here and there, a recurrent state everywhere else."""

    def read(fields: Fields) -> tuple[LayerMemory, ...]:
        count, recurrent, full = fields.layers(), state(fields), attention_layer(fields)
        kinds = _kinds(fields)
        if kinds is None:
            every = fields.optional(("full_attention_interval",)) or interval
            if every is None:
                raise LayoutError("config.json does not say which layers attend (layer_types)")
            return tuple(full if (layer + 1) % every == 0 else recurrent for layer in range(count))
        return tuple(_one_of(kind, full, recurrent) for kind in kinds)

    return read


def _one_of(kind: str, full: LayerMemory, recurrent: LayerMemory) -> LayerMemory:
    if kind in _FULL_KINDS:
        return full
    if kind in _RECURRENT_KINDS:
        return recurrent
    if kind in _IDLE_KINDS:
        return LayerMemory(NOTHING)
    raise LayoutError(f"a layer of kind '{kind}'")


def _jamba(fields: Fields) -> tuple[LayerMemory, ...]:
    period = fields.whole(("attn_layer_period",), 8)
    first = fields.count("attn_layer_offset", 4)
    state, full = mamba_state(fields), attention_layer(fields)
    return tuple(full if layer % period == first else state for layer in range(fields.layers()))


def _listed(state: Callable[[Fields], LayerMemory]) -> Reader:
    """Layers that attend are listed by number, or by the kind of each layer."""

    def read(fields: Fields) -> tuple[LayerMemory, ...]:
        attend = fields.numbers("attn_layer_indices", "full_attn_idxs")
        if attend is None:
            return _hybrid(state, None)(fields)
        keeps, full = state(fields), attention_layer(fields)
        return tuple(full if layer in attend else keeps for layer in range(fields.layers()))

    return read


def _both_at_once(fields: Fields) -> tuple[LayerMemory, ...]:
    """Falcon H1: each layer attends and has a state."""
    full = attention_layer(fields)
    both = LayerMemory(FULL, full.heads, full.elements, full.key_elements, state=mamba2_state(fields).state)
    return (both,) * fields.layers()


def _by_letters(fields: Fields) -> tuple[LayerMemory, ...]:
    """Nemotron H: one letter a layer: M a state, * attention, - and E neither."""
    pattern = fields.raw("hybrid_override_pattern")
    if pattern is None:
        return _hybrid(mamba2_state, None)(fields)
    if not isinstance(pattern, str) or set(pattern) - set("M*-E"):
        raise LayoutError("'hybrid_override_pattern' is no string of M, *, - and E")
    within_layers(len(pattern))
    shapes = {"M": mamba2_state(fields), "*": attention_layer(fields)}
    return tuple(shapes.get(letter, LayerMemory(NOTHING)) for letter in pattern)


def _only(state: Callable[[Fields], LayerMemory]) -> Reader:
    def read(fields: Fields) -> tuple[LayerMemory, ...]:
        return (state(fields),) * fields.layers()

    return read


def _kimi_linear(fields: Fields) -> tuple[LayerMemory, ...]:
    nested = fields.raw("linear_attn_config")
    if not isinstance(nested, Mapping):
        raise LayoutError("'linear_attn_config' is no object")
    attend = Fields(nested, None, fields.model_type).numbers("full_attn_layers")
    if attend is None:
        raise LayoutError("'linear_attn_config' does not list 'full_attn_layers'")
    state, full = delta_attention_state(nested), _latent_layer(fields)  # listed ones are counted from 1
    return tuple(full if layer + 1 in attend else state for layer in range(fields.layers()))


def _by_kind(
    fields: Fields, window: int | None, slides: Callable[[int], bool], kind: str = SLIDING
) -> tuple[LayerMemory, ...]:
    """Full and windowed layers of one shape: by `layer_types` where the config has it, else by rule."""
    full, count, kinds = attention_layer(fields), fields.layers(), _kinds(fields)
    if window is None:
        local = full
    else:
        local = LayerMemory(kind, full.heads, full.elements, full.key_elements, window_tokens=window)
    if kinds is None:
        return tuple(local if slides(layer) else full for layer in range(count))
    known = {**dict.fromkeys(_FULL_KINDS, full), **dict.fromkeys(_SLIDING_KINDS | _CHUNKED_KINDS, local)}
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise LayoutError(f"layers of kind {', '.join(unknown)}")
    return tuple(known[name] for name in kinds)


def _kinds(fields: Fields) -> list[str] | None:
    kinds: Any = fields.raw("layer_types") or fields.raw("layers_block_type")
    if kinds is None:
        return None
    count = fields.layers()
    if not isinstance(kinds, list) or len(kinds) != count:
        raise LayoutError(f"'layer_types' does not name {count} layers")
    return [str(kind) for kind in kinds]


_WINDOWED = frozenset({"sliding_window_pattern", "_sliding_window_pattern"})
_LATENT_FIELDS = frozenset({"kv_lora_rank", "q_lora_rank", "v_head_dim"})
_INDEXED = _LATENT_FIELDS | {"index_head_dim", "index_topk"}
_LINEAR_FIELDS = frozenset({"linear_num_value_heads", "full_attention_interval"})
_MAMBA_FIELDS = frozenset(
    {"mamba_d_state", "mamba_expand", "attn_layer_period", "attn_layer_indices", "layers_block_type",
     "hybrid_override_pattern", "state_size", "ssm_state_size", "mamba_num_heads"}
)  # fmt: skip
_PLAIN = (
    "apertus", "arcee", "baichuan", "bloom", "cohere", "codegen", "dbrx", "deepseek", "ernie4_5",
    "ernie4_5_moe", "exaone", "falcon", "gemma", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode",
    "gpt_neox", "gptj", "granite", "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm",
    "internlm2", "internlm3", "llama", "minicpm", "minimax_m2", "ministral3", "mpt", "nemotron", "olmo",
    "olmo2", "olmoe", "opt", "persimmon", "phi", "qwen", "qwen3_vl_text", "qwen3_vl_moe_text",
    "RefinedWeb", "RefinedWebModel", "seed_oss", "stablelm", "xverse", "chatglm",
)  # fmt: skip

_LATENT_FAMILY = Family(_latent, _LATENT_FIELDS)
_INDEXED_FAMILY = Family(_latent_with_index, _INDEXED, cache_default="fp8")
_DELTA_NET = Family(_hybrid(delta_net_state, 4), _LINEAR_FIELDS, draft_layers=1)

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(_PLAIN, Family(_plain)),
    **dict.fromkeys(
        ("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2"), Family(_every_layer_slides)
    ),
    **dict.fromkeys(
        ("qwen2", "qwen3", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"),
        Family(_slides_if_switched_on),
    ),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "smollm3"), Family(_slides_as_listed)),
    "gemma2": Family(_every_nth_is_full(2), _WINDOWED),
    "gpt_oss": Family(_every_nth_is_full(2), _WINDOWED),
    "gemma3_text": Family(_every_nth_is_full(6), _WINDOWED),
    "cohere2": Family(_every_nth_is_full(4), _WINDOWED),
    "exaone4": Family(_every_nth_is_full(4), _WINDOWED),
    "olmo3": Family(_every_nth_is_full(4), _WINDOWED),
    "gemma3n_text": Family(_last_layers_share, _WINDOWED | {"num_kv_shared_layers"}),
    "gemma4_text": Family(
        _two_shapes, _WINDOWED | {"num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads"}
    ),
    "llama4_text": Family(_chunked, frozenset({"attention_chunk_size"})),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _LATENT_FAMILY),
    "longcat_flash": Family(_latent_twice, _LATENT_FIELDS),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _INDEXED_FAMILY),
    "kimi_linear": Family(_kimi_linear, _LATENT_FIELDS | {"linear_attn_config"}),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA_NET),
    "jamba": Family(_jamba, _MAMBA_FIELDS),
    **dict.fromkeys(("bamba", "granitemoehybrid"), Family(_listed(mamba2_state), _MAMBA_FIELDS)),
    "falcon_h1": Family(_both_at_once, _MAMBA_FIELDS),
    "nemotron_h": Family(_by_letters, _MAMBA_FIELDS),
    **dict.fromkeys(("mamba", "falcon_mamba"), Family(_only(mamba_state), _MAMBA_FIELDS)),
    "mamba2": Family(_only(mamba2_state), _MAMBA_FIELDS),
    **dict.fromkeys(("lfm2", "lfm2_moe"), Family(_listed(short_convolution_state), _MAMBA_FIELDS)),
}  # fmt: skip
