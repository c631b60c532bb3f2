"""Which attention a replica uses: what its device, type and torch can do, tried out before it serves.

Nothing is believed of a kernel: each candidate has to give what grouped attention gives, on a small pool
with this model's heads and windows, or the next one is taken. The reason is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.engines.torch_engine.attention import AttentionPath, GroupedAttention
from workers.engines.torch_engine.batch import BatchBuilder
from workers.engines.torch_engine.config import ModelConfig
from workers.engines.torch_engine.kv_pool import KvPool, allocate_pool
from workers.engines.torch_engine.kv_types import FP8
from workers.engines.torch_engine.scheduler import Chunk, Sequence
from workers.protocol.digests import KV_BLOCK_TOKENS

log = logging.getLogger(__name__)

ATTENTION_CHOICES = ("auto", "grouped", "varlen", "flex")
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Of values that are about 1."""
_TRIAL_BLOCKS = 24
_TRIAL_CHUNKS = ((0, 20), (36, 1), (90, 1), (30, 10), (17, 1))
"""(tokens before, tokens of the chunk): prefill, decoding, and a chunk in the middle."""
_FIRST_FLASH_CAPABILITY = (8, 0)
_LARGEST_FLASH_HEAD = 256


class AttentionError(ValueError):
    """The attention that was asked for cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a kernel has to cope with."""

    device_kind: str
    capability: tuple[int, int] | None
    """Of a CUDA device."""
    compute_dtype: torch.dtype
    kv_dtype: torch.dtype
    head_size: int


Candidate = tuple[str, Callable[[], AttentionPath]]


def choose_attention(
    wanted: str, config: ModelConfig, pool: KvPool, *, compute_dtype: torch.dtype
) -> AttentionPath:
    """Return the first way that is possible and proves right. Raises `AttentionError` if told which."""
    device = pool.blocks.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    needs = AttentionNeeds(device.type, capability, compute_dtype, pool.keys.dtype, config.head_size)
    for name, build in _candidates(wanted, needs):
        refusal = why_not(name, needs) or _try_out(build, config, needs, device)
        if not refusal:
            log.info("attention: %s", name)
            return build()
        log.info("attention: not %s: %s", name, refusal)
        if wanted == name:
            raise AttentionError(f"attention {name} cannot be used: {refusal}")
    log.info("attention: grouped")
    return GroupedAttention(config)


def why_not(name: str, needs: AttentionNeeds) -> str:
    """Say why a way is not even tried; empty: it may be."""
    if name == "flex":
        return ""
    if needs.device_kind != "cuda":
        return f"flash attention runs on CUDA, not on {needs.device_kind}"
    obstacles = {
        "flash attention needs compute capability 8.0 or newer": (needs.capability or (0, 0))
        < _FIRST_FLASH_CAPABILITY,
        f"flash attention knows no {needs.compute_dtype}": needs.compute_dtype
        not in {torch.bfloat16, torch.float16},
        f"flash attention knows no heads of {needs.head_size}": needs.head_size > _LARGEST_FLASH_HEAD
        or needs.head_size % 8 > 0,
        "blocks of 8-bit floats are converted as they are gathered": name == "varlen_paged"
        and needs.kv_dtype == FP8,
    }
    return next((text for text, applies in obstacles.items() if applies), "")


def _candidates(wanted: str, needs: AttentionNeeds) -> Iterator[Candidate]:
    """Name the ways to try, best first; grouped attention comes after them and needs no trial."""
    if wanted == "grouped" or (wanted == "auto" and needs.device_kind != "cuda"):
        return
    if wanted in {"auto", "varlen"}:
        yield "varlen_paged", lambda: _varlen(paged=True)
        yield "varlen", lambda: _varlen(paged=False)
    if wanted in {"auto", "flex"}:
        yield "flex", lambda: _flex(compiled=needs.device_kind == "cuda")


def _varlen(*, paged: bool) -> AttentionPath:
    from workers.engines.torch_engine.ragged_attention import VarlenAttention  # noqa: PLC0415 - takes seconds

    return VarlenAttention(paged=paged)


def _flex(*, compiled: bool) -> AttentionPath:
    from workers.engines.torch_engine.ragged_attention import FlexAttention  # noqa: PLC0415 - takes seconds

    return FlexAttention(compiled=compiled)


def _try_out(
    build: Callable[[], AttentionPath], config: ModelConfig, needs: AttentionNeeds, device: torch.device
) -> str:
    """Attend once in this way and once in groups; say how they differ."""
    try:
        worst = max(
            largest_difference(build(), config, window, needs, device) for window in set(config.layer_windows)
        )
    except Exception as error:  # noqa: BLE001 - compilers and kernels raise what they like; the next way is tried
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a message'}"
    allowed = _TOLERANCE[needs.compute_dtype]
    return "" if worst <= allowed else f"its results are off by {worst:.2g}, allowed are {allowed:.2g}"


def largest_difference(
    path: AttentionPath,
    config: ModelConfig,
    window: int | None,
    needs: AttentionNeeds,
    device: torch.device,
) -> float:
    """Return the largest difference of any element between one way to attend and grouped attention."""
    small = replace(config, layers=1, layer_windows=(window,))
    pool = allocate_pool(
        small, _TRIAL_BLOCKS, dtype=needs.kv_dtype, device=device, compute_dtype=needs.compute_dtype
    )
    generator = torch.Generator().manual_seed(7)
    free = torch.randperm(_TRIAL_BLOCKS, generator=generator).tolist()

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, needs.compute_dtype)

    tokens = _TRIAL_BLOCKS * KV_BLOCK_TOKENS
    places = torch.arange(tokens, device=device)
    everywhere = (places // KV_BLOCK_TOKENS, places % KV_BLOCK_TOKENS)
    vectors = (tokens, small.kv_heads, small.head_size)
    pool.write(0, everywhere, noise(*vectors), noise(*vectors))
    chunks = []
    for before, count in _TRIAL_CHUNKS:
        needed = -(-(before + count) // KV_BLOCK_TOKENS)
        blocks, free = free[:needed], free[needed:]
        chunks.append(Chunk(Sequence("", [0] * (before + count), blocks=blocks), before, count))
    rows = sum(count for _, count in _TRIAL_CHUNKS)
    query = noise(rows, small.heads, small.head_size)
    results = []
    for way in (GroupedAttention(small), path):
        batch = BatchBuilder(
            device=device,
            dtype=needs.compute_dtype,
            shared_heads=small.heads // small.kv_heads,
            windows=(window,),
            ragged=way.is_ragged,
        ).build(chunks)
        fresh = tuple(blocks[batch.slots] for blocks in _everything(pool))
        results.append(way.mix(batch.attention[window], query, (fresh[0], fresh[1]), pool, 0))
    return float((results[0].float() - results[1].float()).abs().max())


def _everything(pool: KvPool) -> tuple[Tensor, Tensor]:
    return pool.gather(0, torch.arange(pool.total_blocks, device=pool.blocks.device))
