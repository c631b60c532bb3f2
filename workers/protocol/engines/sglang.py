"""Options of SGLang, compared with its own parser (`make vllm`)."""

from __future__ import annotations

from workers.protocol.engines.kinds import (
    ChoiceOption,
    IntegerOption,
    JsonOption,
    NumberOption,
    SwitchOption,
    TextOption,
)
from workers.protocol.engines.option import EngineOption, EngineTable, Options, whole

SGLANG = "sglang"
NEWEST = (0, 5, 23)
KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16")
LOAD_FORMATS = (
    *("auto", "safetensors", "pt", "npcache", "dummy", "sharded_state", "presharded", "gguf", "bitsandbytes"),
    *("mistral", "layered", "flash_rl", "fastsafetensors", "instanttensor", "runai_streamer", "expert_pack"),
)
STORAGE = ("file", "mooncake", "hf3fs", "nixl", "aibrix", "shm", "mori", "simm", "eic", "seaweedfs")
_SIZES = ("tp_size", "pp_size", "dp_size")
_RANKS = IntegerOption(1, 1024)
_TOKENS = IntegerOption(1, 1_000_000_000)

_PARALLEL = (
    EngineOption(
        "tp_size",
        _RANKS,
        "parallel",
        "Accelerators that each layer is split over.",
        "1",
        aliases=("--tensor-parallel-size", "--tp"),
    ),
    EngineOption(
        "pp_size",
        _RANKS,
        "parallel",
        "Stages that the layers are divided into.",
        "1",
        aliases=("--pipeline-parallel-size", "--pp"),
    ),
    EngineOption(
        "dp_size",
        _RANKS,
        "parallel",
        "Copies behind one port; with enable_dp_attention, parts of one copy's accelerators.",
        "1",
        aliases=("--data-parallel-size", "--dp"),
    ),
    EngineOption(
        "enable_dp_attention",
        SwitchOption(),
        "parallel",
        "Each of dp_size groups of the same accelerators keeps KV of its own requests.",
        "off",
    ),
    EngineOption(
        "ep_size",
        _RANKS,
        "parallel",
        "Ranks that a mixture's experts are divided over.",
        "1",
        aliases=("--expert-parallel-size", "--ep"),
    ),
    EngineOption(
        "moe_a2a_backend", TextOption(40), "parallel", "What exchanges tokens between experts.", "none"
    ),
)
_LENGTH = (
    EngineOption(
        "context_length",
        IntegerOption(1, 100_000_000),
        "length",
        "Longest prompt and answer together, in tokens.",
        "what config.json says",
    ),
    EngineOption(
        "max_running_requests",
        IntegerOption(1, 65_536),
        "length",
        "Most requests that run at once.",
        "by the memory",
    ),
    EngineOption(
        "chunked_prefill_size",
        IntegerOption(-1, 10_000_000),
        "length",
        "Tokens of a prompt that one step prefills; -1: all of it.",
        "2,048 to 16,384, by the card",
    ),
    EngineOption("max_prefill_tokens", _TOKENS, "length", "Most tokens that one batch prefills.", "16,384"),
    EngineOption("enable_mixed_chunk", SwitchOption(), "length", "Prefill and answers in one step.", "off"),
    EngineOption("schedule_policy", TextOption(40), "length", "Whose turn it is.", "fcfs: first come"),
)
_MEMORY = (
    EngineOption(
        "mem_fraction_static",
        NumberOption(0.01, 0.99),
        "memory",
        "Share of the free memory for weights and KV; the rest is for activations.",
        "0.75 to 0.9, by the card",
    ),
    EngineOption(
        "max_total_tokens",
        _TOKENS,
        "memory",
        "Tokens of KV memory, instead of all that fits.",
        "as many as fit",
    ),
    EngineOption(
        "cpu_offload_gb", IntegerOption(0, 65_536), "memory", "Weights that stay in host memory, in GB.", "0"
    ),
    EngineOption(
        "enable_hierarchical_cache",
        SwitchOption(),
        "memory",
        "Keep KV that leaves the cards in host memory.",
        "off",
        aliases=("--enable-hicache",),
    ),
    EngineOption(
        "hicache_ratio",
        NumberOption(0.01, 1000.0),
        "memory",
        "Host memory for KV, as a multiple of the card's.",
        "2",
    ),
    EngineOption(
        "hicache_size",
        IntegerOption(0, 65_536),
        "memory",
        "Host memory for KV of each rank, in GB, instead of the ratio.",
        "by the ratio",
    ),
    EngineOption(
        "hicache_write_policy",
        ChoiceOption(("write_through", "write_through_selective", "write_back")),
        "memory",
        "When KV is copied to host memory.",
        "write_through",
    ),
    EngineOption(
        "hicache_storage_backend",
        ChoiceOption(STORAGE),
        "memory",
        "What keeps KV behind host memory.",
        "none",
    ),
    EngineOption(
        "enable_lmcache",
        SwitchOption(),
        "memory",
        "Have LMCache keep KV that leaves the cards, instead of the hierarchical cache.",
        "off",
    ),
    EngineOption(
        "kvcached",
        SwitchOption(),
        "memory",
        "Take card memory for KV as it is needed and give it back, so that engines on one card share it."
        " Needs kvcached beside the engine.",
        "off",
        built=True,
        since=(0, 4, 9),
        instead="leave it out",
    ),
    EngineOption(
        "lmcache_cpu_gb",
        NumberOption(0.1, 65_536.0),
        "memory",
        "Host memory in which LMCache keeps KV, in GB, for each rank.",
        "5",
        built=True,
    ),
    EngineOption(
        "enable_memory_saver",
        SwitchOption(),
        "memory",
        "Let a standby give its card's memory back until it is needed.",
        "off",
    ),
)
_CACHE = (
    EngineOption(
        "kv_cache_dtype", ChoiceOption(KV_DTYPES), "cache", "Element type of KV.", "auto: the model's"
    ),
    EngineOption(
        "page_size", IntegerOption(1, 1024), "cache", "Tokens of a KV page.", "1, or what the kernels want"
    ),
    EngineOption(
        "disable_radix_cache",
        SwitchOption(),
        "cache",
        "Keep no KV of what was read: every prompt is prefilled whole.",
        "off",
    ),
    EngineOption(
        "radix_eviction_policy",
        ChoiceOption(("lru", "lfu", "slru", "priority", "tlru")),
        "cache",
        "Which KV goes first.",
        "lru",
    ),
    EngineOption(
        "kv_events",
        SwitchOption(),
        "cache",
        "Tell which blocks come and go, so that requests are sent where their beginning is kept.",
        "off",
        built=True,
    ),
    EngineOption(
        "swa_full_tokens_ratio",
        NumberOption(0.0, 10.0),
        "cache",
        "Of models with windows: KV of windowed layers to that of full ones.",
        "by the model",
    ),
)
_MODEL = (
    EngineOption(
        "dtype",
        ChoiceOption(("auto", "half", "float16", "bfloat16", "float", "float32")),
        "model",
        "Element type of weights and activations.",
        "auto: the model's",
    ),
    EngineOption(
        "quantization",
        TextOption(60),
        "model",
        "How weights are quantised, if config.json does not say.",
        "as config.json says",
    ),
    EngineOption(
        "load_format",
        ChoiceOption(LOAD_FORMATS),
        "model",
        "How weights are read; dummy makes them up.",
        "auto",
    ),
    EngineOption("model_loader_extra_config", JsonOption(), "model", "Settings of the loader's own.", "none"),
    EngineOption(
        "disable_cuda_graph", SwitchOption(), "model", "No CUDA graphs: starts sooner, is slower.", "off"
    ),
    EngineOption(
        "json_model_override_args", JsonOption(), "model", "Fields that replace those of config.json.", "none"
    ),
    EngineOption(
        "trust_remote_code",
        SwitchOption(),
        "model",
        "Run Python that comes with the model. Only on nodes whose operator allows it.",
        "off",
    ),
    EngineOption("speculative_algorithm", TextOption(40), "model", "Drafting of tokens ahead.", "none"),
    EngineOption(
        "random_seed", IntegerOption(0, (1 << 31) - 1), "model", "Seed of sampling.", "drawn at start"
    ),
    EngineOption("tool_call_parser", TextOption(60), "model", "Which model's tool calls are read.", "none"),
    EngineOption(
        "reasoning_parser", TextOption(60), "model", "Which model's reasoning is told apart.", "none"
    ),
    EngineOption("deepep_config", JsonOption(), "model", "Settings of DeepEP.", "none"),
    EngineOption(
        "watchdog_timeout",
        NumberOption(1.0, 86_400.0),
        "model",
        "Seconds that one step may take before it ends itself.",
        "300",
    ),
)

TABLE = EngineTable(
    engine=SGLANG,
    title="SGLang",
    options=(*_PARALLEL, *_LENGTH, *_MEMORY, *_CACHE, *_MODEL),
    newest=NEWEST,
    agents_flags=(
        *(
            "--host",
            "--port",
            "--model",
            "--model-path",
            "--served-model-name",
            "--api-key",
            "--admin-api-key",
        ),
        *("--config", "--fastapi-root-path", "--download-dir", "--tokenizer-path", "--file-storage-path"),
        *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-keyfile-password", "--enable-http2"),
        *("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--nccl-port"),
        *(
            "--grpc-mode",
            "--grpc-port",
            "--enable-metrics",
            "--kv-events-config",
            "--engine-info-bootstrap-port",
        ),
        *("--disaggregation-mode", "--disaggregation-bootstrap-port", "--enable-ssl-refresh"),
        *("--smg-http-sidecar-port", "--log-requests", "--load-publish-endpoint"),
    ),
    # By the first, whoever asks sends code along.
    code_flags=("--enable-custom-logit-processor", "--custom-weight-loader", "--forward-hooks"),
    environment_prefixes=(
        *(
            "SGLANG_",
            "SGL_",
            "NCCL_",
            "UCX_",
            "GLOO_",
            "NVSHMEM_",
            "MOONCAKE_",
            "NIXL_",
            "LMCACHE_",
            "TORCH_",
        ),
        *("TORCHINDUCTOR_", "TRITON_", "FLASHINFER_", "DG_", "OMP_", "MC_", "KVCACHED_", "ENABLE_KVCACHED"),
    ),
    agents_environment=("SGLANG_HOST_IP", "SGLANG_PORT", "SGLANG_ALLOW_REQUEST_HOST_OVERRIDE"),
)


def ranks(options: Options) -> int:
    """Accelerators that one replica takes on all its nodes."""
    tp, pp, dp = (whole(options, name, 1) for name in _SIZES)
    return tp * pp * (1 if options.get("enable_dp_attention") else dp)


def parallel_words(options: Options) -> str:
    """What decides on them, as it was said."""
    return " and ".join(f"{name} {options[name]}" for name in _SIZES if name in options) or f"{_SIZES[0]} 1"
