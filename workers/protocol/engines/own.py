"""Options of the engines that come with this product: the built-in one, and the simulated one."""

from __future__ import annotations

from collections.abc import Mapping

from workers.protocol.engines.kinds import (
    ChoiceOption,
    EngineOptionError,
    IntegerOption,
    NumberOption,
    SwitchOption,
)
from workers.protocol.engines.option import EngineOption, EngineTable

TORCH, SIMULATED = "torch", "simulated"
SIMULATED_NODE = "simulated-node"
"""Of nodes that are simulated whole, engine and all."""
EVICTIONS = ("lru", "lfu")
_AGENTS_FLAGS = (
    *("--holder", "--host", "--kv-disk-dir", "--kv-pool-bytes", "--kv-pool-dir", "--port", "--model-dir"),
    *("--model-digest", "--served-model-name", "--memory-bytes", "--weights-cache"),
    *("--stage", "--rendezvous", "--join-seconds", "--silence-seconds"),
)
_BLOCKS = IntegerOption(1, 100_000_000)
_MILLISECONDS = NumberOption(0.0, 600_000.0)
_SECONDS = NumberOption(0.0, 86_400.0)
_DRAIN = EngineOption(
    "drain_seconds", _SECONDS, "model", "How long open requests may take once it is told to end.", "30"
)

_TORCH = (
    EngineOption(
        "max_model_len",
        IntegerOption(16, 10_000_000),
        "length",
        "Longest prompt and answer together, in tokens.",
        "what config.json says",
    ),
    EngineOption("max_num_seqs", IntegerOption(1, 4096), "length", "Most requests that run at once.", "64"),
    EngineOption(
        "max_num_batched_tokens",
        IntegerOption(1, 1_000_000),
        "length",
        "Most tokens in one step: more is quicker prefill and slower answers meanwhile.",
        "by the device",
    ),
    EngineOption(
        "num_blocks", _BLOCKS, "memory", "KV blocks of 16 tokens.", "what the memory per replica leaves"
    ),
    EngineOption(
        "kv_memory_bytes",
        IntegerOption(1 << 16, 1 << 44),
        "memory",
        "KV memory in bytes.",
        "what the memory per replica leaves",
    ),
    EngineOption(
        "kv_pool",
        ChoiceOption(("node", "private")),
        "memory",
        "Blocks of a pool that the node's replicas share, or of its own.",
        "node",
    ),
    EngineOption("kv_min_blocks", _BLOCKS, "memory", "Blocks of the pool that are always its own.", "none"),
    EngineOption("kv_max_blocks", _BLOCKS, "memory", "Most blocks of the pool that it takes.", "all"),
    EngineOption(
        "kv_host_bytes",
        IntegerOption(0, 1 << 44),
        "memory",
        "Host memory for KV that leaves the blocks.",
        "none",
    ),
    EngineOption(
        "kv_disk_bytes", IntegerOption(0, 1 << 48), "memory", "Disk for KV below host memory.", "none"
    ),
    EngineOption(
        "weights",
        ChoiceOption(("shared", "private")),
        "memory",
        "One copy for all replicas of a node with the same weights, or its own.",
        "shared",
    ),
    EngineOption(
        "kv_dtype", ChoiceOption(("auto", "model", "fp8_e4m3")), "cache", "Element type of KV.", "auto"
    ),
    EngineOption("kv_eviction", ChoiceOption(EVICTIONS), "cache", "Which KV goes first.", "lru"),
    EngineOption(
        "pipeline_stages",
        IntegerOption(1, 64),
        "model",
        "Processes that the layers are split over, one on each node of a replica over several nodes.",
        "1",
    ),
    EngineOption(
        "step_seconds",
        NumberOption(1.0, 86_400.0),
        "model",
        "With several stages, how long a step may take: one that takes longer ends the replica.",
        "300",
    ),
    EngineOption(
        "device", ChoiceOption(("auto", "cpu", "cuda")), "model", "What it runs on.", "auto: what it is given"
    ),
    EngineOption(
        "dtype",
        ChoiceOption(("auto", "float32", "bfloat16", "float16")),
        "model",
        "Element type of weights and activations.",
        "auto: the model's",
    ),
    EngineOption(
        "attention",
        ChoiceOption(("auto", "grouped", "varlen", "flex")),
        "model",
        "How attention is computed.",
        "auto: by the device",
    ),
    EngineOption(
        "threads", IntegerOption(1, 1024), "model", "Threads on a CPU.", "an even share of the node's cores"
    ),
    _DRAIN,
)
_SIMULATED = (
    EngineOption("ttft_ms", _MILLISECONDS, "pace", "Time to the first token, in milliseconds.", "50"),
    EngineOption("itl_ms", _MILLISECONDS, "pace", "Time between tokens, in milliseconds.", "10"),
    EngineOption("jitter_ratio", NumberOption(0.0, 1.0), "pace", "How much these vary, as a ratio.", "0"),
    EngineOption("load_seconds", _SECONDS, "pace", "How long it seems to load.", "0"),
    EngineOption("seed", IntegerOption(0, (1 << 31) - 1), "pace", "Seed of what is drawn.", "0"),
    EngineOption("kv_blocks", IntegerOption(1, 10_000_000), "memory", "KV blocks that it pretends.", "2,048"),
    EngineOption("max_model_len", IntegerOption(16, 10_000_000), "length", "Longest context.", "4,096"),
    EngineOption("max_num_seqs", IntegerOption(1, 4096), "length", "Most requests at once.", "64"),
    EngineOption(
        "enable_sleep_mode",
        SwitchOption(),
        "memory",
        "Let a standby pretend to give memory back until it is needed.",
        "off",
    ),
    EngineOption("wake_seconds", _SECONDS, "pace", "How long it seems to wake; it sleeps at once.", "0"),
    EngineOption("fail_waking", SwitchOption(), "faults", "Waking it fails.", "off"),
    EngineOption(
        "fail_after",
        IntegerOption(0, 1_000_000_000),
        "faults",
        "Requests after which its model loop dies.",
        "never",
    ),
    EngineOption("fail_loading", SwitchOption(), "faults", "Loading fails.", "off"),
    EngineOption("exit_after_seconds", _SECONDS, "faults", "When it ends by itself.", "never"),
    EngineOption("exit_code", IntegerOption(0, 255), "faults", "With which code.", "1"),
    EngineOption("hang_after_seconds", _SECONDS, "faults", "When nothing answers any more.", "never"),
    EngineOption("hang", SwitchOption(), "faults", "Nothing ever answers.", "off"),
    EngineOption("ignore_sigterm", SwitchOption(), "faults", "It does not end when asked to.", "off"),
    _DRAIN,
)
_NOT_IN_STAGES = {
    "kv_host_bytes": "KV below the blocks",
    "kv_disk_bytes": "KV below the blocks",
    "kv_min_blocks": "a share of the node's pool",
    "kv_max_blocks": "a share of the node's pool",
}
"""What needs a whole model's blocks in one process, and so works without stages only."""


def check_stages(options: Mapping[str, object]) -> None:
    """Raise `EngineOptionError` for what does not go with `pipeline_stages` above 1."""
    if options.get("pipeline_stages", 1) == 1:
        return
    wanted = [name for name in _NOT_IN_STAGES if options.get(name)]
    if options.get("kv_pool") == "node":
        wanted.append("kv_pool")
    if wanted:
        what = _NOT_IN_STAGES.get(wanted[0], "the node's pool")
        raise EngineOptionError(
            f"{wanted[0]} asks for {what}, which needs all layers in one process: "
            "leave out it or pipeline_stages",
            wanted[0],
        )


TORCH_TABLE = EngineTable(TORCH, "Built-in (torch)", _TORCH, _AGENTS_FLAGS, check_together=check_stages)
SIMULATED_TABLE = EngineTable(SIMULATED, "Simulated", _SIMULATED, _AGENTS_FLAGS)
