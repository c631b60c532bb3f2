"""Bytes of KV cache: of a token, of a sequence, of each accelerator, and why not where it is not known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby, pairwise
from math import ceil
from typing import Any

from exaserve_ops.serving.domain.kv_config import read_layout
from exaserve_ops.serving.domain.kv_dtypes import AUTO, BFLOAT16, ElementType, element_type
from exaserve_ops.serving.domain.kv_layout import FULL, KvLayout, LayerMemory, UnknownLayout

MOST_STAGES = 1024
"""Of a pipeline: a launch may name any number, and each is laid out."""
FP8_LATENT_BYTES = 656
"""vLLM's `fp8_ds_mla`: 512 fp8 numbers, four float32 scales, and 64 rotated ones in bfloat16."""
_FP8_LATENT = "fp8_ds_mla"


@dataclass(frozen=True, slots=True)
class KvOptions:
    """What a launch says that changes the KV cache."""

    kv_dtype: str = AUTO
    vector_scale_bytes: int = 0
    """Beside each key and each value of one head and token: the scale of its 8-bit floats."""
    model_dtype: str = ""
    """Type that the model computes in, if the launch says so; empty: the checkpoint's."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    windows_off: bool = False
    """The engine keeps all tokens in layers with a window, too."""
    draft_layers: bool = False
    """Multi-token prediction is on."""


@dataclass(frozen=True, slots=True)
class WindowShare:
    """Layers that keep no more than so many of the newest tokens."""

    bytes_per_token: int
    window_tokens: int

    def bytes_at(self, tokens: int) -> int:
        """What they hold of a sequence of `tokens`."""
        return self.bytes_per_token * min(max(tokens, 0), self.window_tokens)


@dataclass(frozen=True, slots=True)
class KvShare:
    """KV memory of the whole model, or of what one accelerator holds of it."""

    growth_bytes_per_token: int
    """Of layers that keep every token."""
    windows: tuple[WindowShare, ...]
    state_bytes: int
    """Fixed, for each sequence."""

    def capped_bytes(self, tokens: int | None = None) -> int:
        """What layers with a window hold at most: of `tokens`, or however long a sequence is."""
        return sum(w.bytes_at(w.window_tokens if tokens is None else tokens) for w in self.windows)

    def bytes_at(self, tokens: int, *, block_tokens: int = 1) -> int:
        """Bytes of one sequence of `tokens`, in whole blocks."""
        blocks = -(-max(tokens, 0) // block_tokens)
        held = blocks * block_tokens
        windows = sum(
            w.bytes_per_token * min(held, -(-w.window_tokens // block_tokens) * block_tokens)
            for w in self.windows
        )
        return held * self.growth_bytes_per_token + windows + self.state_bytes

    def tokens_within(self, budget_bytes: int, *, at_most: int, block_tokens: int = 1) -> int:
        """Longest sequence whose bytes fit, up to `at_most`; 0 if none fits."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            if self.bytes_at(middle, block_tokens=block_tokens) <= budget_bytes:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True, slots=True)
class KvTerm:
    """One product of the arithmetic, for people."""

    name: str
    formula: str
    bytes: int
    per: str
    """`token`, `token up to 4,096` or `sequence`."""


@dataclass(frozen=True, slots=True)
class KvBytes:
    """KV memory of one sequence of a model, as launched."""

    element: ElementType
    whole: KvShare
    """Before tensor parallelism."""
    each: tuple[KvShare, ...]
    """What one accelerator holds, of each stage of the pipeline."""
    terms: tuple[KvTerm, ...]
    assumptions: tuple[str, ...]

    @property
    def growth_bytes_per_token(self) -> int:
        """Of the whole model: what each further token takes, however long the sequence is."""
        return self.whole.growth_bytes_per_token

    @property
    def growth_bytes_each(self) -> int:
        """Of the accelerator that holds most."""
        return max(share.growth_bytes_per_token for share in self.each)

    def bytes_each(self, tokens: int, *, block_tokens: int = 1) -> int:
        """Bytes of one sequence on the accelerator that holds most of it."""
        return max(share.bytes_at(tokens, block_tokens=block_tokens) for share in self.each)

    def tokens_within(self, budget_bytes: int, *, at_most: int, block_tokens: int = 1) -> int:
        """Longest sequence for which `budget_bytes` of each accelerator suffice."""
        return min(
            share.tokens_within(budget_bytes, at_most=at_most, block_tokens=block_tokens)
            for share in self.each
        )


def kv_bytes_of(config: Mapping[str, Any], options: KvOptions | None = None) -> KvBytes | UnknownLayout:
    """KV memory of a model by its config.json, as launched with `options`."""
    layout = read_layout(config)
    return layout if isinstance(layout, UnknownLayout) else kv_bytes(layout, options or KvOptions())


def kv_bytes(layout: KvLayout, options: KvOptions) -> KvBytes | UnknownLayout:
    """KV memory of a layout, as launched with `options`.

    Refused are a split that engines refuse, and a type that is not known.
    """
    layers = layout.layers + (layout.draft_layers if options.draft_layers else ())
    if options.windows_off:
        layers = tuple(_without_window(layer) for layer in layers)
    types = _types(layout, options)
    if isinstance(types, str):
        return UnknownLayout(types, _bound(layers))
    types = replace(types, vector_scale_bytes=options.vector_scale_bytes)
    refusal = _refuse_split(layout, layers, options.tensor_parallel)
    if options.pipeline_parallel > MOST_STAGES:
        refusal = f"a pipeline of {options.pipeline_parallel:,} stages; at most {MOST_STAGES:,} are counted"
    if refusal:
        return UnknownLayout(refusal, _bound(layers), int(types.model))
    stages = _stages(layers, options.pipeline_parallel)
    return KvBytes(
        element=types.cache,
        whole=_share(layers, 1, types),
        each=tuple(_share(stage, options.tensor_parallel, types) for stage in stages),
        terms=tuple(_terms(layers, types)),
        assumptions=layout.assumptions + types.assumptions,
    )


@dataclass(frozen=True, slots=True)
class _Types:
    """What numbers take."""

    cache: ElementType
    model: Fraction
    assumptions: tuple[str, ...] = ()
    vector_scale_bytes: int = 0

    def token_bytes(self, layer: LayerMemory, heads: int) -> Fraction:
        """One token in one layer, of so many heads."""
        if self.cache.name == _FP8_LATENT and not layer.is_split and layer.heads:
            return Fraction(FP8_LATENT_BYTES + layer.index_bytes)
        scales = 2 * self.vector_scale_bytes if layer.is_split else 0
        numbers = heads * (layer.elements * self.cache.bytes_each + scales)
        return numbers + (layer.index_bytes if layer.heads else 0)


def _types(layout: KvLayout, options: KvOptions) -> _Types | str:
    """Types of model and cache. `auto` is the model's, unless the checkpoint brings scales for another."""
    stated = options.model_dtype if options.model_dtype not in ("", AUTO) else layout.dtype
    assumptions: tuple[str, ...] = ()
    if not stated:
        stated = "bfloat16"
        assumptions = ("config.json names no dtype: two bytes a number",)
    model = element_type(stated)
    if model is None:
        return f"dtype '{stated}' is not known"
    # Checkpoints that are stored in fewer bits are computed in 16.
    compute = model if model.bytes_each >= BFLOAT16.bytes_each else BFLOAT16
    if options.kv_dtype not in ("", AUTO):
        return _told_type(options.kv_dtype, compute.bytes_each, assumptions)
    scales = element_type(layout.kv_dtype, why="the checkpoint brings scales for it")
    if scales is not None:
        return _Types(scales, compute.bytes_each, assumptions)
    own = element_type(layout.cache_default, why="what engines choose for this family")
    if own is not None:
        return _Types(own, compute.bytes_each, assumptions)
    return _Types(replace(compute, why="the model's own"), compute.bytes_each, assumptions)


def _told_type(name: str, model: Fraction, assumptions: tuple[str, ...]) -> _Types | str:
    if name == _FP8_LATENT:
        return _Types(ElementType(name, Fraction(1), "as launched"), model, assumptions)
    told = element_type(name, why="as launched")
    return f"KV cache type '{name}' is not known" if told is None else _Types(told, model, assumptions)


def _bound(layers: Iterable[LayerMemory]) -> int:
    return sum(layer.elements_per_token for layer in layers)


def _without_window(layer: LayerMemory) -> LayerMemory:
    return layer if layer.window_tokens is None else replace(layer, kind=FULL, window_tokens=None)


def _refuse_split(layout: KvLayout, layers: tuple[LayerMemory, ...], ways: int) -> str:
    """Why engines refuse to split the model in so many ways; empty where they do not."""
    if layout.attention_heads % ways:
        return f"{layout.attention_heads} attention heads cannot be split over {ways} accelerators"
    for layer in layers:
        if layer.is_split and layer.heads and layer.heads % ways and ways % layer.heads:
            return f"{layer.heads} KV heads can be neither split nor repeated over {ways} accelerators"
    return ""


def _stages(layers: tuple[LayerMemory, ...], stages: int) -> list[tuple[LayerMemory, ...]]:
    """Consecutive layers for each stage; those that remain go to the last stages but the very last."""
    sizes = [len(layers) // stages] * stages
    for extra in range(len(layers) % stages):
        sizes[-2 - extra] += 1
    cuts = [sum(sizes[:n]) for n in range(stages + 1)]
    return [layers[a:b] for a, b in pairwise(cuts)]


def _heads_each(layer: LayerMemory, ways: int) -> int:
    """Heads that one accelerator keeps: at least one, so fewer heads than accelerators are repeated."""
    return max(1, layer.heads // ways) if layer.is_split and layer.heads else layer.heads


def _share(layers: tuple[LayerMemory, ...], ways: int, types: _Types) -> KvShare:
    growth, windows, state = Fraction(0), dict[int, Fraction](), 0
    for layer in layers:
        per_token = types.token_bytes(layer, _heads_each(layer, ways))
        if layer.window_tokens is None:
            growth += per_token
        else:
            windows[layer.window_tokens] = windows.get(layer.window_tokens, Fraction(0)) + per_token
        for part in layer.state:
            each = part.element_bytes or types.model
            state += ceil(-(-part.units // ways) * part.elements_each * each)
    shares = tuple(WindowShare(ceil(size), window) for window, size in sorted(windows.items()))
    return KvShare(ceil(growth), shares, state)


def _terms(layers: tuple[LayerMemory, ...], types: _Types) -> Iterable[KvTerm]:
    """The arithmetic of the whole model: equal layers together, layers that grow first."""
    kept = sorted((x for x in layers if x.heads or x.state), key=_term_order)
    for layer, equal in groupby(kept):
        count = len(list(equal))
        if layer.heads:
            per = "token" if layer.window_tokens is None else f"token up to {layer.window_tokens:,}"
            size = ceil(count * types.token_bytes(layer, layer.heads))
            yield KvTerm(layer.kind, _formula(layer, count, types), size, per)
        for part in layer.state:
            each = part.element_bytes or types.model
            size = ceil(count * part.units * part.elements_each * each)
            formula = f"{count} layers x {part.units:,} x {part.elements_each:,} x {_plain(each)} B"
            yield KvTerm(part.name, formula, size, "sequence")


def _term_order(layer: LayerMemory) -> tuple[Any, ...]:
    return (
        not layer.heads,
        layer.window_tokens or 0,
        layer.kind,
        layer.heads,
        layer.elements,
        repr(layer.state),
    )


def _formula(layer: LayerMemory, count: int, types: _Types) -> str:
    if not layer.is_split:
        if types.cache.name == _FP8_LATENT:
            return f"{count} layers x {FP8_LATENT_BYTES + layer.index_bytes} B"
        index = f" + {count} x {layer.index_bytes} B of index" if layer.index_bytes else ""
        rope = layer.elements - layer.key_elements
        return f"{count} layers x ({layer.key_elements} + {rope}) x {_plain(types.cache.bytes_each)} B{index}"
    size = layer.key_elements
    each = f"{size} x {_plain(types.cache.bytes_each)}"
    if types.vector_scale_bytes:
        each = f"({each} + {types.vector_scale_bytes} of scale)"
    return f"2 x {count} layers x {layer.heads} KV heads x {each} B"


def _plain(value: Fraction | int) -> str:
    return f"{float(value):g}"
