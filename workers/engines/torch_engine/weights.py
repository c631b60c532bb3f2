"""Weights from safetensors files onto a device, fused the way the model multiplies them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.packing import PackedWeight, onednn_takes, pack

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MATRICES = frozenset({"qkv", "output", "gate_up", "down", "head"})
"""What rows are multiplied with; the rest is looked up, added or scaled by."""

Matrix = Tensor | PackedWeight


class WeightsError(ValueError):
    """The weights do not fit the config or cannot be read; the message says which."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Query, key and value are one matrix, and so are gate and up."""

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a decoder of the Llama family, or of one stage of it."""

    embedding: Tensor | None
    """`None`: this is not the first stage."""
    layers: tuple[LayerWeights, ...]
    norm: Tensor | None
    """`None`: this is not the last stage, as for the head."""
    head: Matrix | None
    """The embedding itself when the two are tied and it is multiplied with as it lies."""

    @property
    def total_bytes(self) -> int:
        """Memory that the weights take; a tied head takes some only if it is packed."""
        layers = [getattr(layer, name) for layer in self.layers for name in layer.__slots__]
        tensors: list[Matrix | None] = [self.embedding, self.norm, *layers]
        if self.head is not self.embedding:
            tensors.append(self.head)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor that the decoder multiplies with, and what it is put together from."""

    name: str
    """`embedding`, `norm`, `head`, or `<layer>.<field of LayerWeights>`."""
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """Names in the model's files and their shapes, joined along the first axis in this order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        _, (_, *rest) = self.parts[0]
        return (sum(shape[0] for _, shape in self.parts), *rest)

    @property
    def is_matrix(self) -> bool:
        """Whether rows are multiplied with it, so that it may be packed."""
        return self.name.rpartition(".")[2] in _MATRICES


def plan_tensors(config: ModelConfig, *, packed: bool = False) -> tuple[FusedTensor, ...]:
    """Name every tensor of a model, layer by layer in the order of use.

    With `packed`, or in a stage that has no embedding, a tied head is a tensor of its own: rows are looked up
    in one layout, multiplied with in another. Layers are called as they are numbered within the stage.
    """
    stage, vocabulary, hidden = config.stage, config.vocabulary_size, config.hidden_size
    embedding = (("model.embed_tokens.weight", (vocabulary, hidden)),)
    tensors = [FusedTensor("embedding", embedding)] if stage.is_first else []
    for index in range(config.layers):
        tensors += _plan_layer(config, index)
    if not stage.is_last:
        return tuple(tensors)
    tensors.append(FusedTensor("norm", (("model.norm.weight", (hidden,)),)))
    if not config.tied_embeddings:
        tensors.append(FusedTensor("head", (("lm_head.weight", (vocabulary, hidden)),)))
    elif packed or not stage.is_first:
        tensors.append(FusedTensor("head", embedding))
    return tuple(tensors)


def _plan_layer(config: ModelConfig, index: int) -> Iterator[FusedTensor]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    heads = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
    layer = f"model.layers.{config.stage.first_layer + index}."
    attention, mlp = layer + "self_attn.", layer + "mlp."

    def fused(field: str, *parts: tuple[str, tuple[int, ...]]) -> FusedTensor:
        return FusedTensor(f"{index}.{field}", parts)

    yield fused("input_norm", (layer + "input_layernorm.weight", (hidden,)))
    yield fused("qkv", *((f"{attention}{name}.weight", (size, hidden)) for name, size in heads))
    if config.qkv_bias:
        yield fused("qkv_bias", *((f"{attention}{name}.bias", (size,)) for name, size in heads))
    if config.qk_norm:
        yield fused("query_norm", (attention + "q_norm.weight", (config.head_size,)))
        yield fused("key_norm", (attention + "k_norm.weight", (config.head_size,)))
    yield fused("output", (attention + "o_proj.weight", (hidden, query)))
    if config.output_bias:
        yield fused("output_bias", (attention + "o_proj.bias", (hidden,)))
    yield fused("mlp_norm", (layer + "post_attention_layernorm.weight", (hidden,)))
    yield fused("gate_up", *((f"{mlp}{name}_proj.weight", (inner, hidden)) for name in ("gate", "up")))
    yield fused("down", (mlp + "down_proj.weight", (hidden, inner)))


def assemble(config: ModelConfig, tensors: Mapping[str, Matrix]) -> ModelWeights:
    """Put the tensors of `plan_tensors`, by name, into their places."""
    names = [field.name for field in fields(LayerWeights)]
    embedding, norm = tensors.get("embedding"), tensors.get("norm")
    if isinstance(embedding, PackedWeight) or isinstance(norm, PackedWeight):
        raise WeightsError("only matrices are packed")
    return ModelWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(**{name: tensors.get(f"{index}.{name}") for name in names})  # type: ignore[arg-type]  # the plan has those that are not optional
            for index in range(config.layers)
        ),
        norm=norm,
        head=tensors.get("head", embedding if config.stage.is_last else None),
    )


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[float], None],
    pack_matrices: bool = False,
) -> ModelWeights:
    """Load all weights; `on_progress` hears the part done, 0-1. Raises `WeightsError`.

    With `pack_matrices` a CPU gets those that oneDNN multiplies in its own layout.
    """
    packed = pack_matrices and device.type == "cpu" and onednn_takes(dtype)
    plan = plan_tensors(config, packed=packed)
    tensors: dict[str, Matrix] = {}
    for tensor in read_tensors(model_dir, plan, device=device, dtype=dtype):
        wanted = plan[len(tensors)]
        tensors[wanted.name] = pack(tensor) if packed and wanted.is_matrix else tensor
        on_progress(len(tensors) / len(plan))
    return assemble(config, tensors)


def read_tensors(
    model_dir: Path, plan: tuple[FusedTensor, ...], *, device: torch.device, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the tensors of a plan in its order, one in memory at a time. Raises `WeightsError`."""
    with ExitStack() as stack:
        reader = _Reader(model_dir, stack, device, dtype)
        for tensor in plan:
            parts = [reader.read(name, shape) for name, shape in tensor.parts]
            yield parts[0] if len(parts) == 1 else torch.cat(parts)


class _Reader:
    """Reads single tensors by name out of one file or several."""

    def __init__(self, model_dir: Path, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._files: dict[str, Any] = {}
        """Tensor name to open file."""
        for path in weight_files(model_dir):
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


def weight_files(model_dir: Path) -> list[Path]:
    """Files that hold a model's weights, by its index if it has one. Raises `WeightsError`."""
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
