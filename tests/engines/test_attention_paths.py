"""Every way to attend gives what grouped attention gives, and only one that does is used.

Kernels that run on CUDA alone are tried by `tests/cuda` where there is a device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from workers.engines.torch_engine import attention_choice
from workers.engines.torch_engine.attention import GroupedAttention
from workers.engines.torch_engine.attention_choice import (
    AttentionError,
    AttentionNeeds,
    choose_attention,
    largest_difference,
    why_not,
)
from workers.engines.torch_engine.batch import Attention
from workers.engines.torch_engine.config import ModelConfig, RopeConfig
from workers.engines.torch_engine.kv_pool import KvPool, allocate_pool
from workers.engines.torch_engine.kv_types import FP8
from workers.engines.torch_engine.ragged import plan_ragged
from workers.engines.torch_engine.scheduler import Chunk
from workers.engines.torch_engine.scheduler import Sequence as Request

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocabulary_size=64,
    hidden_size=64,
    intermediate_size=64,
    layers=1,
    heads=4,
    kv_heads=2,
    head_size=16,
    norm_epsilon=1e-6,
    rope=RopeConfig(1e4),
    max_position_tokens=512,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    dtype="float32",
    eos_token_ids=frozenset(),
    layer_windows=(None,),
)
NEEDS = AttentionNeeds("cpu", None, torch.float32, torch.float32, CONFIG.head_size)
ON_HOPPER = replace(NEEDS, device_kind="cuda", capability=(9, 0), compute_dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _without_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention warns once that it is not compiled, which is what is wanted here."""
    from torch.nn.attention import flex_attention as module  # noqa: PLC0415 - takes seconds to import

    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 5, 16, 33])
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_flex_attention_equals_grouped(kv_heads: int, window: int | None, kv_dtype: torch.dtype) -> None:
    from workers.engines.torch_engine.ragged_attention import FlexAttention  # noqa: PLC0415 - takes seconds

    config = replace(CONFIG, kv_heads=kv_heads)
    needs = replace(NEEDS, kv_dtype=kv_dtype)
    assert largest_difference(FlexAttention(compiled=False), config, window, needs, CPU) < 1e-5


def varlen_in_words(  # noqa: PLR0913, PLR0917 - as the function that it stands for
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor | None,
    most_queries: int,
    most_keys: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor | None,
) -> Tensor:
    """A FAKE of `torch.nn.attention.varlen.varlen_attn`, which runs on CUDA only, after its documentation.

    Sequence by sequence: the last query is at the last key; `window_size` says how many keys before and
    behind its own place a query sees, -1 for all.
    """
    assert enable_gqa
    mixed = torch.empty_like(query)
    for at, (first, end, keys) in enumerate(zip(query_starts, query_starts[1:], seqused_k, strict=False)):
        rows, count = int(end - first), int(keys)
        assert rows <= most_queries
        assert count <= most_keys
        if block_table is None:
            assert key_starts is not None
            assert key_starts[at] + count <= key_starts[at + 1]
            seen = slice(int(key_starts[at]), int(key_starts[at]) + count)
            own_key, own_value = key[seen], value[seen]
        else:
            assert key_starts is None
            pages = block_table[at].long()
            own_key, own_value = (pool[pages].flatten(0, 1)[:count] for pool in (key, value))
        places = torch.arange(count - rows, count)[:, None]
        hidden = torch.arange(count) > places + window_size[1]
        if window_size[0] >= 0:
            hidden |= torch.arange(count) < places - window_size[0]
        scores = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        mixed[first:end] = torch.nn.functional.scaled_dot_product_attention(
            query[first:end].transpose(0, 1)[None],
            own_key.transpose(0, 1)[None],
            own_value.transpose(0, 1)[None],
            attn_mask=scores,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return mixed


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("window", [None, 1, 16, 33])
def test_varlen_attention_tells_the_kernel_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, window: int | None, *, paged: bool
) -> None:
    """What is handed over, given a kernel that does what its documentation says."""
    from workers.engines.torch_engine import ragged_attention  # noqa: PLC0415 - takes seconds

    monkeypatch.setattr(ragged_attention, "varlen_attn", varlen_in_words)
    path = ragged_attention.VarlenAttention(paged=paged)
    assert largest_difference(path, CONFIG, window, NEEDS, CPU) < 1e-5
    if not paged:
        assert largest_difference(path, CONFIG, window, replace(NEEDS, kv_dtype=FP8), CPU) < 1e-5


def test_flex_mask_names_every_block_of_keys_that_is_seen() -> None:
    """What a compiled kernel skips: the mask of a CPU run does not show it, so it is checked by itself."""
    from workers.engines.torch_engine.ragged_attention import flex_mask  # noqa: PLC0415 - takes seconds

    lengths = [(0, 200), (300, 1), (40, 70), (130, 1), (5, 1), (0, 300)]
    chunks, next_block = [], 0
    for before, count in lengths:
        blocks = list(range(next_block, next_block + -(-(before + count) // 16)))
        next_block += len(blocks)
        chunks.append(Chunk(Request("", [0] * (before + count), blocks=blocks), before, count))
    mask = flex_mask(plan_ragged(chunks, 50, CPU))
    rows, keys = mask.seq_lengths
    seen = torch.vmap(
        torch.vmap(lambda q, k: mask.mask_mod(None, None, q, k), in_dims=(None, 0)), in_dims=(0, None)
    )(torch.arange(rows), torch.arange(keys))
    assert seen.sum(dim=1).tolist() == [
        min(50, position + 1) for before, count in lengths for position in range(before, before + count)
    ]
    listed = torch.zeros(-(-rows // 128), -(-keys // 128), dtype=torch.bool)
    for row, count in enumerate(mask.kv_num_blocks[0, 0].tolist()):
        listed[row, mask.kv_indices[0, 0, row, :count].long()] = True
    assert not listed.all(), "nothing is skipped"
    where = seen.nonzero()
    assert listed[where[:, 0] // 128, where[:, 1] // 128].all()


def test_ragged_batch_names_no_block_but_its_sequences_own() -> None:
    chunks = [
        Chunk(Request("", [0] * 40, blocks=[7, 3, 9]), 39, 1),
        Chunk(Request("", [0] * 5, blocks=[4]), 0, 5),
    ]
    ragged = plan_ragged(chunks, None, CPU)
    assert ragged.table.tolist() == [7, 3, 9, 4]
    assert ragged.paged_table.tolist() == [[7, 3, 9], [4, 4, 4]]
    assert (ragged.query_starts.tolist(), ragged.key_starts.tolist()) == ([0, 1, 6], [0, 48, 64])
    assert ragged.key_counts.tolist() == [40, 5]
    windowed = plan_ragged(chunks, 9, CPU)
    assert windowed.table.tolist() == [3, 9, 4]
    assert windowed.key_counts.tolist() == [24, 5]
    assert windowed.first_positions.tolist() == [16, 0]


def pool_of(kv_dtype: torch.dtype = torch.float32) -> KvPool:
    return allocate_pool(CONFIG, 2, dtype=kv_dtype, device=CPU, compute_dtype=torch.float32)


def test_choice_on_a_cpu() -> None:
    chosen = choose_attention("auto", CONFIG, pool_of(), compute_dtype=torch.float32)
    assert chosen.name == "grouped"
    assert choose_attention("flex", CONFIG, pool_of(FP8), compute_dtype=torch.float32).name == "flex"
    with pytest.raises(
        AttentionError, match="varlen cannot be used: flash attention runs on CUDA, not on cpu"
    ):
        choose_attention("varlen", CONFIG, pool_of(), compute_dtype=torch.float32)


@pytest.mark.parametrize(
    ("needs", "name", "reason"),
    [
        (ON_HOPPER, "varlen_paged", ""),
        (replace(ON_HOPPER, kv_dtype=FP8), "varlen_paged", "converted as they are gathered"),
        (replace(ON_HOPPER, kv_dtype=FP8), "varlen", ""),
        (replace(ON_HOPPER, capability=(7, 5)), "varlen", "8.0 or newer"),
        (replace(ON_HOPPER, compute_dtype=torch.float32), "varlen", "knows no torch.float32"),
        (replace(ON_HOPPER, head_size=288), "varlen", "no heads of 288"),
        (replace(ON_HOPPER, capability=(7, 5)), "flex", ""),
    ],
)
def test_what_is_tried_on_which_device(needs: AttentionNeeds, name: str, reason: str) -> None:
    refusal = why_not(name, needs)
    assert bool(refusal) == bool(reason)
    assert reason in refusal


class WrongAttention(GroupedAttention):
    """A kernel that does its work and does it wrong, or none at all."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(CONFIG)
        self._error = error

    def mix(
        self,
        parts: Sequence[Attention],
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
        pool: KvPool,
        layer: int,
    ) -> Tensor:
        if self._error:
            raise self._error
        return super().mix(parts, query, fresh, pool, layer) * 1.1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "its results are off by 0."),
        (RuntimeError("no kernel image\nmore"), "RuntimeError: no kernel image"),
    ],
)
def test_kernel_that_fails_its_trial_is_not_used(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, reason: str
) -> None:
    monkeypatch.setattr(attention_choice, "_flex", lambda **_: WrongAttention(error))
    with pytest.raises(AttentionError) as refused:
        choose_attention("flex", CONFIG, pool_of(), compute_dtype=torch.float32)
    assert reason in str(refused.value)
    assert "more" not in str(refused.value)


def test_replica_that_attends_in_groups_imports_no_compiler() -> None:
    """The imports of the other ways take two seconds, which each replica would pay."""
    code = "import sys, workers.engines.torch_engine.loading; sys.exit('torch._dynamo' in sys.modules)"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=root, env=environment)
    assert done.returncode == 0
