"""Weights from safetensors files onto a device, fused the way the model multiplies them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.engines.torch_engine.config import ModelConfig

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class WeightsError(ValueError):
    """The weights do not fit the config or cannot be read; the message says which."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Query, key and value are one matrix, and so are gate and up."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a decoder of the Llama family."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """The embedding itself when the two are tied."""

    @property
    def total_bytes(self) -> int:
        """Memory that the weights take; a tied head takes none of its own."""
        layers = [getattr(layer, name) for layer in self.layers for name in layer.__slots__]
        tensors = [self.embedding, self.norm, *layers]
        if self.head is not self.embedding:
            tensors.append(self.head)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[float], None],
) -> ModelWeights:
    """Load all weights; `on_progress` hears the part done, 0-1. Raises `WeightsError`."""
    with ExitStack() as stack:
        reader = _Reader(model_dir, stack, device, dtype)
        embedding = reader.read("model.embed_tokens.weight", (config.vocabulary_size, config.hidden_size))
        layers = []
        for index in range(config.layers):
            layers.append(_load_layer(reader, config, f"model.layers.{index}."))
            on_progress((index + 1) / config.layers)
        head = embedding
        if not config.tied_embeddings:
            head = reader.read("lm_head.weight", (config.vocabulary_size, config.hidden_size))
        norm = reader.read("model.norm.weight", (config.hidden_size,))
    return ModelWeights(embedding=embedding, layers=tuple(layers), norm=norm, head=head)


def _load_layer(reader: _Reader, config: ModelConfig, prefix: str) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    attention = prefix + "self_attn."
    sizes = {"q_proj": query, "k_proj": kv, "v_proj": kv}
    qkv = [reader.read(f"{attention}{name}.weight", (n, hidden)) for name, n in sizes.items()]
    gate_up = [reader.read(f"{prefix}mlp.{n}_proj.weight", (inner, hidden)) for n in ("gate", "up")]
    bias = None
    if config.qkv_bias:
        bias = torch.cat([reader.read(f"{attention}{n}.bias", (s,)) for n, s in sizes.items()])
    norms: list[Tensor | None] = [None, None]
    if config.qk_norm:
        size = (config.head_size,)
        norms = [reader.read(f"{attention}{n}_norm.weight", size) for n in ("q", "k")]
    return LayerWeights(
        input_norm=reader.read(prefix + "input_layernorm.weight", (hidden,)),
        qkv=torch.cat(qkv),
        qkv_bias=bias,
        query_norm=norms[0],
        key_norm=norms[1],
        output=reader.read(attention + "o_proj.weight", (hidden, query)),
        output_bias=reader.read(attention + "o_proj.bias", (hidden,)) if config.output_bias else None,
        mlp_norm=reader.read(prefix + "post_attention_layernorm.weight", (hidden,)),
        gate_up=torch.cat(gate_up),
        down=reader.read(prefix + "mlp.down_proj.weight", (hidden, inner)),
    )


class _Reader:
    """Reads single tensors by name out of one file or several."""

    def __init__(self, model_dir: Path, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._files: dict[str, Any] = {}
        """Tensor name to open file."""
        for path in _weight_files(model_dir):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"cannot read {path}: {error}") from error
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Copy one tensor to the device. Raises `WeightsError` if it is missing or misshapen."""
        opened = self._files.get(name)
        if opened is None:
            raise WeightsError(f"the weights lack {name}")
        tensor: Tensor = opened.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, the config says {shape}")
        return tensor.to(self._device, self._dtype)


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / _INDEX
    if not index.exists():
        return [model_dir / _SINGLE]
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index} is no index of weights: {error}") from error
    if any(Path(name).name != name for name in names):
        raise WeightsError(f"{index} names files outside its folder")
    return [model_dir / name for name in sorted(names)]
