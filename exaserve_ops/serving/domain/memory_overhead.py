"""Memory of a replica that is neither weights nor KV: estimates, between two bounds and with sources."""

from __future__ import annotations

from dataclasses import dataclass

from exaserve_ops.serving.domain.engine_launch import TORCH, VLLM, EngineLaunch
from exaserve_ops.serving.domain.kv_layout import KvLayout

MIB = 1 << 20
GIB = 1 << 30

CONTEXT_BYTES = (400 * MIB, 800 * MIB)
"""A CUDA context with cuBLAS and NCCL. Operators report 400 to 800 MiB, by driver, card and libraries."""
GRAPH_BYTES = (256 * MIB, 1536 * MIB)
"""Captured graphs. vLLM logs 0.2 to 1.5 GiB ("Graph capturing finished ... took x GiB") for 7B to 70B."""
CPU_PROCESS_BYTES = (32 * MIB, 256 * MIB)
"""A replica of the built-in engine on a CPU, forked off a process that has its imports, or by itself.

36 MB and 190 MB were measured by `bench.density`.
"""
STEP_TOKENS = {"vllm": (2048, 8192), "sglang": (2048, 8192), TORCH: (512, 4096)}
"""Tokens of one step where the launch does not say, by version and card."""
VLLM_CHUNKS_SINCE = (0, 8)
"""Before, a prompt was prefilled in one step, however long."""
HIDDEN_COPIES = (4, 8)
"""Vectors of the hidden size that are alive for each token of a step: residual, input, projections."""
INNER_COPIES = (2, 3)
"""Vectors of the feed-forward's inner size that are alive: gate, up and their product."""
LOGIT_BYTES = (4, 12)
"""A logit in float32, and twice more for sampling: sorted values and their places."""
SAMPLED_ROWS = 256
"""Rows of logits at once: engines warm up with `max_num_seqs`, up to this."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure between two bounds."""

    name: str
    low_bytes: int
    high_bytes: int
    source: str


def overhead(
    launch: EngineLaunch, layout: KvLayout | None, *, kind: str, length_tokens: int | None
) -> tuple[Estimate, ...]:
    """What a replica takes of one accelerator beside weights and KV.

    `layout`: `None` where only the size of the weights is known; activations are then not in it.
    """
    parts = []
    if kind == "cpu":
        parts.append(Estimate("process", *CPU_PROCESS_BYTES, "measured on the built-in engine"))
    else:
        parts.append(Estimate("context", *CONTEXT_BYTES, "driver and libraries, as operators report"))
        if launch.graphs:
            parts.append(Estimate("graphs", *GRAPH_BYTES, "as engines log at start"))
    if layout is not None:
        parts.append(_activations(launch, layout, length_tokens))
    return tuple(parts)


def _activations(launch: EngineLaunch, layout: KvLayout, length_tokens: int | None) -> Estimate:
    """Peak of one step. An engine that does not chunk prefill takes a whole prompt in one step."""
    ways = launch.kv.tensor_parallel
    low, high = STEP_TOKENS[launch.engine]
    if launch.batched_tokens is not None:
        low = high = launch.batched_tokens
        source = f"{low:,} tokens a step, as launched"
    else:
        if launch.engine == VLLM and () < launch.version < VLLM_CHUNKS_SINCE:
            low = high = max(high, length_tokens or 0)
        source = f"{low:,} to {high:,} tokens a step, by version"
    bounds = []
    for place, tokens in enumerate((low, high)):
        inner = (layout.intermediate or 4 * layout.hidden) // ways
        vectors = HIDDEN_COPIES[place] * layout.hidden + INNER_COPIES[place] * inner
        rows = min(SAMPLED_ROWS, launch.sequences)
        bounds.append(tokens * vectors * 2 + rows * layout.vocabulary // ways * LOGIT_BYTES[place])
    return Estimate("activations", bounds[0], bounds[1], source)
