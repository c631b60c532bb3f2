"""The command line and the environment of one vLLM process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from workers.engines.base import EngineInstall, EngineOptions, Launch, LaunchContext, PortBlock
from workers.engines.foreign_launch import (
    ENV_SESSION_MOVES,
    HTTP,
    KV_EVENTS,
    KV_REPLAY,
    KV_TOPIC,
    base_environment,
    check_accelerators,
    check_remote_code,
    event_endpoint,
    first_ports,
    kv_environment,
    require_with,
    socket_folder,
)
from workers.protocol.engines.kinds import EngineOptionError, JsonOption
from workers.protocol.engines.option import Version, option_arguments, read_version, whole
from workers.protocol.engines.session_moves import session_moves
from workers.protocol.engines.vllm import NIXL_CONNECTORS, TABLE, VLLM, parallel_words, ranks

ENTRY = Path(__file__).with_name("entry.py")
GUARD = "exaops_guard.RequireKey"
"""What `entry.py` has asked for the key on every path but health."""
INTERNAL, DATA_PARALLEL, NIXL = "internal", "data parallel", "nixl"
_INTERNAL_PORTS = 8
"""vLLM walks upwards from `VLLM_PORT` for its executors and message queues."""
_SOCKET_NAME_CHARACTERS = 36
"""vLLM's processes talk by sockets that are named by UUIDs."""
_CPU_BLOCK_TOKENS = 32
_CPU_KV_FLAG_SINCE: Version = (0, 32)
"""From then on processors take `--kv-cache-memory-bytes`; before, a variable with whole GiB."""
_LEAST_CPU_KV_BYTES = 64 << 20
_GIB = 1 << 30
_MIDDLEWARE = "exaops_moves.app.SessionMoves"
"""Around its HTTP server, in its own process; the entry makes the module known."""
_LEASE_SECONDS = 30
"""What was exported for a move and not fetched comes free after so long: as long as a move may send."""
_LEASED_SINCE: Version = (0, 22)
"""Before, a variable says that; it held everything for eight minutes otherwise."""
_NEEDS = {
    **dict.fromkeys(
        ("kv_role", "kv_buffer_device", "kv_load_failure_policy", "kv_connector_extra_config"), "kv_connector"
    ),
    "kv_offloading_backend": "kv_offloading_size",
}


def check_options(options: EngineOptions, version: Version) -> None:
    """Raise `EngineOptionError`, naming the option and what would be right."""
    option_arguments(TABLE, options, version)
    require_with(options, _NEEDS)
    if options.get("kv_events") and options.get("enable_prefix_caching") is False:
        raise EngineOptionError(
            "kv_events tell of cached prefixes, and enable_prefix_caching is off", "kv_events"
        )
    if "lmcache_cpu_gb" in options and options.get("kv_connector") != "LMCacheConnectorV1":
        raise EngineOptionError(
            "lmcache_cpu_gb is read with kv_connector LMCacheConnectorV1: choose that, or leave it out",
            "lmcache_cpu_gb",
        )
    if options.get("kv_connector") and options.get("kv_offloading_size"):
        raise EngineOptionError(
            "kv_offloading_size chooses a connector of its own: leave it out, or kv_connector", "kv_connector"
        )


def port_blocks(options: EngineOptions) -> tuple[PortBlock, ...]:
    """What to lease: HTTP, what vLLM chooses among by itself, and one per copy of what copies have each."""
    copies = whole(options, "data_parallel_size", 1)
    blocks = [PortBlock(HTTP), PortBlock(INTERNAL, _INTERNAL_PORTS * copies)]
    if copies > 1:
        blocks.append(PortBlock(DATA_PARALLEL))
    if options.get("kv_connector") in NIXL_CONNECTORS:
        blocks.append(PortBlock(NIXL, copies))
    if options.get("kv_events"):
        blocks += [PortBlock(KV_EVENTS, copies), PortBlock(KV_REPLAY, copies)]
    return tuple(blocks)


def build_launch(options: EngineOptions, context: LaunchContext, install: EngineInstall) -> Launch:
    """Return the process to start. Raises `EngineOptionError`."""
    version = read_version(install.version)
    check_options(options, version)
    check_remote_code(options, context)
    check_accelerators(parallel_words(options), ranks(options), context)
    if context.rank is not None and whole(options, "data_parallel_size", 1) > 1:
        raise EngineOptionError(
            "data_parallel_size is for copies on one node: with several nodes to a replica leave it out, and "
            "have more replicas",
            "data_parallel_size",
        )
    ports = first_ports(port_blocks(options), context.ports)
    arguments = [
        f"--model={context.model_dir}",
        f"--served-model-name={context.served_model_name}",
        f"--host={context.host}",
        f"--port={ports[HTTP]}",
        # Else no answer says how much of its prompt was in cache, which sessions and validations ask for.
        "--enable-prompt-tokens-details",
        f"--middleware={GUARD}",
        *_rank_arguments(context),
        *_move_arguments(context),
        *_parallel_arguments(context, ports),
        *option_arguments(TABLE, options, version),
        *_cpu_arguments(options, context, version),
        *_transfer_arguments(options, context),
        *_event_arguments(options, ports),
    ]
    argv = (str(install.python), "-P", str(ENTRY), *arguments)
    return Launch(argv, _environment(options, context, install, ports))


def _rank_arguments(context: LaunchContext) -> list[str]:
    rank = context.rank
    if rank is None:
        return []
    place = [
        f"--nnodes={rank.nodes}",
        f"--node-rank={rank.rank}",
        f"--master-addr={rank.master_host}",
        f"--master-port={rank.master_port}",
    ]
    # Rank 0 alone has an API server.
    return [*place, "--headless"] if rank.rank else place


def _move_arguments(context: LaunchContext) -> list[str]:
    """What moves its sessions, and keeps clients from naming KV, where it has an HTTP server.

    Behind the guard on the line, so outside of it: other engines come with the key of a transfer.
    """
    return [] if context.rank is not None and context.rank.rank else [f"--middleware={_MIDDLEWARE}"]


def _parallel_arguments(context: LaunchContext, ports: Mapping[str, int]) -> list[str]:
    port = ports.get(DATA_PARALLEL)
    if port is None:
        return []
    return [f"--data-parallel-address={context.host}", f"--data-parallel-rpc-port={port}"]


def _cpu_arguments(options: EngineOptions, context: LaunchContext, version: Version) -> list[str]:
    """On processors its share would be of all the machine's memory: it is told its KV memory instead."""
    if context.accelerator_kind != "cpu":
        return []
    if options.get("enable_sleep_mode"):
        raise EngineOptionError(
            "vLLM cannot sleep on a CPU: leave enable_sleep_mode out", "enable_sleep_mode"
        )
    block = whole(options, "block_size", _CPU_BLOCK_TOKENS)
    if block % _CPU_BLOCK_TOKENS:
        raise EngineOptionError(
            f"block_size must be a multiple of {_CPU_BLOCK_TOKENS} on a CPU, not {block}", "block_size"
        )
    arguments = [] if "block_size" in options else [f"--block-size={_CPU_BLOCK_TOKENS}"]
    told = {"kv_cache_memory_bytes", "gpu_memory_utilization"} & options.keys()
    if not told and _takes_kv_flag(version):
        arguments.append(f"--kv-cache-memory-bytes={_cpu_kv_bytes(context)}")
    return arguments


def _takes_kv_flag(version: Version) -> bool:
    return not version or version >= _CPU_KV_FLAG_SINCE


def _cpu_kv_bytes(context: LaunchContext) -> int:
    """Half of what its memory leaves beside the weights: the other half is for activations and Python."""
    return max(_LEAST_CPU_KV_BYTES, (context.memory_bytes - context.weights_bytes) // 2)


def _transfer_arguments(options: EngineOptions, context: LaunchContext) -> list[str]:
    connector = options.get("kv_connector")
    if not connector:
        return []
    on_cpu = context.accelerator_kind == "cpu"
    settings: dict[str, object] = {"kv_connector": connector, "kv_role": options.get("kv_role", "kv_both")}
    device = options.get("kv_buffer_device", "cpu" if on_cpu and connector in NIXL_CONNECTORS else None)
    if device:
        settings["kv_buffer_device"] = device
    if "kv_load_failure_policy" in options:
        settings["kv_load_failure_policy"] = options["kv_load_failure_policy"]
    given = options.get("kv_connector_extra_config")
    extra = JsonOption.read("kv_connector_extra_config", given) if isinstance(given, str) else {}
    if connector in NIXL_CONNECTORS and isinstance(extra, dict):
        extra = {"kv_lease_duration": _LEASE_SECONDS, **extra}
    if extra:
        settings["kv_connector_extra_config"] = extra
    return [f"--kv-transfer-config={json.dumps(settings, separators=(',', ':'))}"]


def _event_arguments(options: EngineOptions, ports: Mapping[str, int]) -> list[str]:
    if not options.get("kv_events"):
        return []
    settings = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": event_endpoint(ports[KV_EVENTS]),
        "replay_endpoint": event_endpoint(ports[KV_REPLAY]),
        "topic": KV_TOPIC,
    }
    return [f"--kv-events-config={json.dumps(settings, separators=(',', ':'))}"]


def _environment(
    options: EngineOptions, context: LaunchContext, install: EngineInstall, ports: Mapping[str, int]
) -> dict[str, str]:
    environment = base_environment(install, context, TABLE, options) | kv_environment(options, context)
    environment |= {
        "VLLM_API_KEY": context.api_key,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": context.host,
        "VLLM_PORT": str(ports[INTERNAL]),
        "VLLM_CACHE_ROOT": f"{context.engine_cache or context.runtime_dir}/vllm",
        "VLLM_CONFIG_ROOT": str(context.runtime_dir),
        "VLLM_RPC_BASE_PATH": socket_folder(context, _SOCKET_NAME_CHARACTERS),
    }
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if options.get("enable_sleep_mode"):
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # its control paths exist only then
    nodes = 1 if context.rank is None else context.rank.nodes
    environment[ENV_SESSION_MOVES] = session_moves(VLLM, options, nodes=nodes)
    if NIXL in ports:
        environment |= _nixl_environment(context, install, ports[NIXL])
    if context.accelerator_kind == "cpu":
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not _takes_kv_flag(read_version(install.version)):
            told = whole(options, "kv_cache_memory_bytes", _cpu_kv_bytes(context))
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, told // _GIB))
    return environment


def _nixl_environment(context: LaunchContext, install: EngineInstall, port: int) -> dict[str, str]:
    version = read_version(install.version)
    leases = not version or version >= _LEASED_SINCE
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": context.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    } | ({} if leases else {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": str(_LEASE_SECONDS)})
