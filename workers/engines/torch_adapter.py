"""Adapter of the built-in torch engine."""

from __future__ import annotations

from dataclasses import replace

from workers.engines.base import EngineOptions, EngineSample, Launch, LaunchContext, NodeRank
from workers.engines.own_launch import own_launch, parse_own_metrics
from workers.protocol import names
from workers.protocol.engines.kinds import EngineOptionError
from workers.protocol.engines.option import option_arguments, whole
from workers.protocol.engines.own import TORCH_TABLE

_PRELOAD = (
    "workers.engines.torch_engine.loading",
    "workers.engines.torch_engine.engine",
    "workers.engines.openai_server.serve",
    # What uvicorn imports when it starts to serve.
    *("uvicorn.protocols.http.httptools_impl", "uvicorn.lifespan.off", "encodings.idna"),
)
"""torch, and all else that a replica imports."""
ENVIRONMENT = {
    # Kernels that oneDNN keeps, by numbers of rows: two thirds of a megabyte each, and without a bound
    # a gigabyte in a replica that has seen prompts of all lengths. A new one takes less than a millisecond.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}
"""Of every replica of this engine."""
_PREPARE = "workers.engines.torch_engine.prepared:prepare"


class TorchAdapter:
    """Launches `workers.engines.torch_engine`."""

    name: str = "torch"
    port_count: int = 1
    health_path: str = "/health"
    metrics_path: str = "/metrics"

    def check_options(self, options: EngineOptions) -> None:
        """Raise `EngineOptionError`, naming the option and what would be right."""
        option_arguments(TORCH_TABLE, options)

    def shares_device_memory(self, options: EngineOptions) -> bool:
        """Unless both its blocks and its weights are to be its own; blocks of several stages always are."""
        if whole(options, "pipeline_stages", 1) > 1:
            return options.get("weights", "shared") == "shared"
        return options.get("kv_pool", "node") == "node" or options.get("weights", "shared") == "shared"

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        """Return the process to start. Raises `EngineOptionError`."""
        defaults: dict[str, str | int] = {"threads": max(context.cpu_threads, 1)}
        if context.accelerator_kind == "cpu":
            # A CPU replica on a node with GPUs must not help itself to one.
            defaults["device"] = "cpu"
        arguments = option_arguments(TORCH_TABLE, {**defaults, **options})
        arguments += _stage_arguments(options, context)
        if context.memory_bytes > 0:
            # What placement set aside; a KV size among the options goes before it.
            arguments.insert(0, f"--memory-bytes={context.memory_bytes}")
        if context.weights_cache is not None:
            arguments.insert(0, f"--weights-cache={context.weights_cache}")
            arguments.insert(0, f"--model-digest={context.model_digest}")
        if context.holder is not None:
            arguments.insert(0, f"--holder={context.holder}")
        if context.kv_pool_dir is not None:
            arguments.insert(0, f"--kv-pool-dir={context.kv_pool_dir}")
            arguments.insert(0, f"--kv-pool-bytes={context.kv_pool_bytes}")
        if context.kv_disk_dir is not None and options.get("kv_disk_bytes"):
            arguments.insert(0, f"--kv-disk-dir={context.kv_disk_dir}")
        # Without a digest nothing says that two folders of one name hold the same model.
        known = (_PREPARE, str(context.model_dir), context.model_digest) if context.model_digest else ()
        launch = own_launch(
            "workers.engines.torch_engine", context, arguments, preload=_PRELOAD, prepare=known
        )
        own = {**ENVIRONMENT, **_caches(context), **_gang_key(context.rank)}
        return replace(launch, env={**launch.env, **own})

    def parse_metrics(self, page: str) -> EngineSample:
        """Read a metrics page. A bad line is dropped and noted; the rest is used."""
        return parse_own_metrics(page)


def _stage_arguments(options: EngineOptions, context: LaunchContext) -> list[str]:
    """Which stage this node has. Raises `EngineOptionError` where there are not as many nodes as stages."""
    rank = context.rank
    stages, nodes = whole(options, "pipeline_stages", 1), 1 if rank is None else rank.nodes
    if stages != nodes:
        raise EngineOptionError(
            f"pipeline_stages {stages} takes as many nodes, and this replica has {nodes}", "pipeline_stages"
        )
    if rank is None or stages == 1:
        return []
    # One stage may have its weights at once and another only from a slow disk: they wait for one another
    # as long as the start may take, and not by a limit of their own.
    join = f"--join-seconds={context.start_seconds}"
    return [f"--stage={rank.rank}", f"--rendezvous={rank.master_host}:{rank.master_port}", join]


def _gang_key(rank: NodeRank | None) -> dict[str, str]:
    return {names.ENV_GANG_KEY: rank.key} if rank is not None and rank.key else {}


def _caches(context: LaunchContext) -> dict[str, str]:
    """Where compiled attention is kept for the next launch; without, each attempt compiles anew."""
    if context.engine_cache is None:
        return {}
    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{context.engine_cache}/inductor",
        "TRITON_CACHE_DIR": f"{context.engine_cache}/triton",
    }
