"""Options of vLLM, compared with its own parser (`make vllm`)."""

from __future__ import annotations

from math import prod

from workers.protocol.engines.kinds import (
    ChoiceOption,
    IntegerOption,
    JsonOption,
    NumberOption,
    SwitchOption,
    TextOption,
)
from workers.protocol.engines.option import EngineOption, EngineTable, Options, whole

VLLM = "vllm"
NEWEST = (0, 33)
KV_DTYPES = (
    *("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"),
    *("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4", "nvfp4_ds_mla"),
    *("turboquant_3bit_nc", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_k8v4"),
)
LOAD_FORMATS = (
    *("auto", "hf", "safetensors", "pt", "npcache", "dummy", "mistral", "sharded_state", "fastsafetensors"),
    *("instanttensor", "runai_streamer", "runai_streamer_sharded", "tensorizer", "modelexpress", "ipc_cache"),
)
CONNECTORS = (
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "LMCacheConnectorV1", "LMCacheMPConnector"),
    *("MooncakeConnector", "MooncakeStoreConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"),
    *("FlexKVConnectorV1", "HF3FSKVConnector", "MoRIIOConnector", "ExampleConnector"),
)
NIXL_CONNECTORS = tuple(name for name in CONNECTORS if name.startswith("Nixl"))
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
ROLES = ("kv_both", "kv_producer", "kv_consumer")
_RANKS = IntegerOption(1, 1024)
_GIB = NumberOption(0.0, 65_536.0)

_PARALLEL = (
    EngineOption(
        "tensor_parallel_size",
        _RANKS,
        "parallel",
        "Accelerators that each layer is split over.",
        "1",
        aliases=("-tp",),
    ),
    EngineOption(
        "pipeline_parallel_size",
        _RANKS,
        "parallel",
        "Stages that the layers are divided into.",
        "1",
        aliases=("-pp",),
    ),
    EngineOption(
        "data_parallel_size",
        _RANKS,
        "parallel",
        "Copies of the model behind one port; each takes as many accelerators as one copy needs.",
        "1",
        aliases=("-dp",),
    ),
    EngineOption(
        "enable_expert_parallel",
        SwitchOption(),
        "parallel",
        "Divide a mixture's experts over the accelerators instead of splitting each.",
        "off",
        aliases=("-ep",),
    ),
)
_LENGTH = (
    EngineOption(
        "max_model_len",
        IntegerOption(1, 100_000_000),
        "length",
        "Longest prompt and answer together, in tokens.",
        "what config.json says",
    ),
    EngineOption(
        "max_num_seqs",
        IntegerOption(1, 65_536),
        "length",
        "Most requests that run at once.",
        "256; 1,024 on cards of the H100's class",
    ),
    EngineOption(
        "max_num_batched_tokens",
        IntegerOption(1, 10_000_000),
        "length",
        "Most tokens in one step: more is quicker prefill and slower answers meanwhile.",
        "2,048 to 16,384, by the card",
    ),
    EngineOption(
        "enable_chunked_prefill",
        SwitchOption(),
        "length",
        "Prefill long prompts in pieces between answers.",
        "on where the model can",
        off_flag="--no-enable-chunked-prefill",
    ),
)
_MEMORY = (
    EngineOption(
        "gpu_memory_utilization",
        NumberOption(0.01, 1.0),
        "memory",
        "Share of each card that it takes for weights, KV and all else.",
        "0.92; 0.9 before version 0.19",
        aliases=("--device-memory-utilization",),
    ),
    EngineOption(
        "kv_cache_memory_bytes",
        IntegerOption(1 << 20, 1 << 44),
        "memory",
        "KV memory of each accelerator, in bytes, instead of a share.",
        "what the share leaves",
        since=(0, 10, 2),
        instead="say gpu_memory_utilization",
    ),
    EngineOption(
        "num_gpu_blocks_override",
        IntegerOption(1, 100_000_000),
        "memory",
        "KV blocks, whatever fits.",
        "as many as fit",
    ),
    EngineOption(
        "cpu_offload_gb", _GIB, "memory", "Weights of each accelerator that stay in host memory, in GiB.", "0"
    ),
    EngineOption(
        "kv_offloading_size",
        _GIB,
        "memory",
        "Host memory for KV that leaves the cards, in GiB, all ranks together.",
        "none",
        since=(0, 11, 1),
        instead="choose kv_connector = OffloadingConnector",
    ),
    EngineOption(
        "kv_offloading_backend",
        ChoiceOption(("native", "lmcache")),
        "memory",
        "Who keeps that KV.",
        "native",
        since=(0, 11, 1),
        instead="choose a kv_connector",
    ),
    EngineOption(
        "kvcached",
        SwitchOption(),
        "memory",
        "Take card memory for KV as it is needed and give it back, so that engines on one card share it."
        " Needs kvcached beside the engine.",
        "off",
        built=True,
        since=(0, 8, 4),
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
        "swap_space",
        _GIB,
        "memory",
        "Host memory for sequences that were swapped out, in GiB.",
        "4",
        until=(0, 18),
        instead="use kv_offloading_size, which keeps KV in host memory",
    ),
    EngineOption(
        "enable_sleep_mode",
        SwitchOption(),
        "memory",
        "Let a standby give its card's memory back until it is needed. Not on processors.",
        "off",
    ),
)
_CACHE = (
    EngineOption(
        "kv_cache_dtype", ChoiceOption(KV_DTYPES), "cache", "Element type of KV.", "auto: the model's"
    ),
    EngineOption(
        "block_size",
        IntegerOption(1, 1024),
        "cache",
        "Tokens of a KV block; on a CPU a multiple of 32.",
        "16, or what the kernels want",
    ),
    EngineOption(
        "enable_prefix_caching",
        SwitchOption(),
        "cache",
        "Keep KV of what was read, for prompts that begin alike.",
        "on",
        off_flag="--no-enable-prefix-caching",
    ),
    EngineOption(
        "prefix_caching_hash_algo",
        ChoiceOption(("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")),
        "cache",
        "How blocks are named; sha256_cbor is the same in every process and language.",
        "sha256",
    ),
    EngineOption(
        "kv_connector",
        ChoiceOption(CONNECTORS),
        "cache",
        "Moves KV between replicas, or to other memory: NixlConnector for moves of conversations.",
        "none",
        built=True,
    ),
    EngineOption(
        "kv_role", ChoiceOption(ROLES), "cache", "What it does for a connector.", "kv_both", built=True
    ),
    EngineOption(
        "kv_buffer_device",
        ChoiceOption(("cpu", "cuda", "xpu")),
        "cache",
        "Where a connector's buffers lie.",
        "the accelerator's memory",
        built=True,
    ),
    EngineOption(
        "kv_load_failure_policy",
        ChoiceOption(("recompute", "fail")),
        "cache",
        "What becomes of a request whose KV does not arrive.",
        "fail",
        built=True,
        since=(0, 12),
        instead="leave it out",
    ),
    EngineOption(
        "kv_connector_extra_config",
        JsonOption(),
        "cache",
        "Settings of the connector's own.",
        "none",
        built=True,
    ),
    EngineOption(
        "kv_events",
        SwitchOption(),
        "cache",
        "Tell which blocks come and go, so that requests are sent where their beginning is kept.",
        "off",
        built=True,
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
        aliases=("-q",),
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
        "enforce_eager",
        SwitchOption(),
        "model",
        "No CUDA graphs and no compiling: starts sooner, is slower.",
        "off",
    ),
    EngineOption("hf_overrides", JsonOption(), "model", "Fields that replace those of config.json.", "none"),
    EngineOption(
        "trust_remote_code",
        SwitchOption(),
        "model",
        "Run Python that comes with the model. Only on nodes whose operator allows it.",
        "off",
    ),
    EngineOption(
        "generation_config",
        TextOption(200),
        "model",
        "auto: the model's own sampling defaults; vllm: none.",
        "auto",
    ),
    EngineOption(
        "speculative_config", JsonOption(), "model", "Drafting of tokens ahead.", "none", aliases=("-sc",)
    ),
    EngineOption("seed", IntegerOption(0, (1 << 32) - 1), "model", "Seed of sampling.", "0"),
    EngineOption("tool_call_parser", TextOption(60), "model", "Which model's tool calls are read.", "none"),
    EngineOption(
        "enable_auto_tool_choice", SwitchOption(), "model", "Let the model choose tools by itself.", "off"
    ),
    EngineOption(
        "reasoning_parser", TextOption(60), "model", "Which model's reasoning is told apart.", "none"
    ),
    EngineOption(
        "shutdown_timeout",
        IntegerOption(0, 3600),
        "model",
        "Seconds that open requests may take once it is told to end.",
        "0: the fleet drains it before",
        since=(0, 17),
        instead="leave it out: the fleet drains a replica before it ends it",
    ),
)

TABLE = EngineTable(
    engine=VLLM,
    title="vLLM",
    options=(*_PARALLEL, *_LENGTH, *_MEMORY, *_CACHE, *_MODEL),
    newest=NEWEST,
    agents_flags=(
        *("--host", "--port", "--uds", "--model", "--model-tag", "--served-model-name", "--api-key"),
        *("--hf-token", "--config", "--root-path", "--middleware", "--download-dir", "--tokenizer"),
        *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"),
        *("--headless", "--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"),
        *(
            "--data-parallel-address",
            "-dpa",
            "--data-parallel-rpc-port",
            "-dpp",
            "--data-parallel-rank",
            "-dpn",
        ),
        *("--data-parallel-start-rank", "-dpr", "--data-parallel-size-local", "-dpl"),
        *("--data-parallel-supervisor-port", "--data-parallel-backend", "-dpb"),
        *(
            "--data-parallel-hybrid-lb",
            "--data-parallel-external-lb",
            "--data-parallel-multi-port-external-lb",
        ),
        *("--api-server-count", "-asc", "--disable-log-stats", "--kv-transfer-config", "--kv-events-config"),
        *("--enable-log-outputs", "--allowed-local-media-path"),
    ),
    code_flags=(
        *("--tool-parser-plugin", "--reasoning-parser-plugin", "--io-processor-plugin"),
        *("--logits-processors", "--worker-cls", "--worker-extension-cls", "--scheduler-cls"),
    ),
    environment_prefixes=(
        *(
            "VLLM_",
            "NCCL_",
            "UCX_",
            "GLOO_",
            "NVSHMEM_",
            "LMCACHE_",
            "MOONCAKE_",
            "NIXL_",
            "TORCH_",
            "TORCHINDUCTOR_",
        ),
        *("TRITON_", "FLASHINFER_", "DG_", "OMP_", "KVCACHED_", "ENABLE_KVCACHED"),
    ),
    agents_environment=(
        *("VLLM_API_KEY", "VLLM_PORT", "VLLM_HOST_IP", "VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS"),
        *("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_CPU_KVCACHE_SPACE"),
        *("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_RPC_BASE_PATH", "VLLM_PLUGINS"),
        *("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        "VLLM_MODEL_REDIRECT_PATH",
    ),
)


def ranks(options: Options) -> int:
    """Accelerators that one replica takes on all its nodes."""
    return prod(whole(options, name, 1) for name in _SIZES)


def parallel_words(options: Options) -> str:
    """What decides on them, as it was said."""
    return " and ".join(f"{name} {options[name]}" for name in _SIZES if name in options) or f"{_SIZES[0]} 1"
