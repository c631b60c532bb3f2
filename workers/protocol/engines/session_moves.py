"""What each engine can do for a conversation that moves to another replica, by its options.

Both sides read it: the control plane plans by it, agents and launches go by it.
"""

from __future__ import annotations

from typing import Literal

from workers.protocol.engines import own, sglang, vllm
from workers.protocol.engines.option import Options, whole

Moves = Literal["block_transfer", "export_import", "warm_prefill", "none"]
BLOCK_TRANSFER: Moves = "block_transfer"
"""Sends KV blocks to one of its kind, block by block and checked."""
EXPORT_IMPORT: Moves = "export_import"
"""Holds a prompt's KV for another one to pull it, by a connector."""
WARM_PREFILL: Moves = "warm_prefill"
"""Knows the conversation's text, so that the target can compute it before its next turn."""
NO_MOVES: Moves = "none"
"""The target computes the context at the next turn."""

_PULLED = ("NixlConnector", "NixlPullConnector")
_KV_SHAPE = {
    vllm.VLLM: (
        *("kv_cache_dtype", "block_size", "dtype", "quantization", "tensor_parallel_size"),
        *("prefix_caching_hash_algo", "kv_connector", "hf_overrides"),
    ),
}
"""Options that decide what KV looks like in memory: it moves only between replicas that have them alike."""


def session_moves(engine: str, options: Options, *, nodes: int = 1) -> Moves:
    """What an engine with these options can do, one replica of which runs on so many nodes."""
    match engine:
        case own.TORCH:
            # Stages have a part of the layers each.
            return BLOCK_TRANSFER if whole(options, "pipeline_stages", 1) == 1 else NO_MOVES
        case vllm.VLLM:
            return _vllm(options, nodes)
        case sglang.SGLANG:
            # Copies of one replica keep caches of their own, and a turn may go to any of them.
            keeps_prefixes = not options.get("disable_radix_cache") and whole(options, "dp_size", 1) == 1
            return WARM_PREFILL if keeps_prefixes else NO_MOVES
        case _:
            return NO_MOVES


def _vllm(options: Options, nodes: int) -> Moves:
    if options.get("enable_prefix_caching") is False or whole(options, "data_parallel_size", 1) > 1:
        return NO_MOVES
    pulls = options.get("kv_connector") in _PULLED and options.get("kv_role", "kv_both") == "kv_both"
    # Stages, ranks on other nodes, and kvcached's memory that comes and goes: none was tried with it.
    is_plain = nodes == whole(options, "pipeline_parallel_size", 1) == 1 and not options.get("kvcached")
    return EXPORT_IMPORT if pulls and is_plain else WARM_PREFILL


def kv_shape(engine: str, options: Options) -> str:
    """Text that is equal for options with which KV of the same weights looks alike."""
    told = {name: options[name] for name in _KV_SHAPE.get(engine, ()) if name in options}
    return f"{engine} {sorted(told.items())}"
