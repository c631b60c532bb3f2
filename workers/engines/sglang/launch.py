"""The command line and the environment of one SGLang process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from workers.engines.base import (
    RENDEZVOUS,
    EngineInstall,
    EngineOptions,
    Launch,
    LaunchContext,
    PortBlock,
)
from workers.engines.foreign_launch import (
    ENV_SESSION_MOVES,
    HTTP,
    KV_EVENTS,
    KV_REPLAY,
    KV_TOPIC,
    base_environment,
    check_accelerators,
    check_remote_code,
    check_socket_room,
    event_endpoint,
    first_ports,
    in_url,
    kv_environment,
    require_with,
)
from workers.protocol import names
from workers.protocol.engines.kinds import EngineOptionError
from workers.protocol.engines.option import Version, option_arguments, read_version, whole
from workers.protocol.engines.session_moves import session_moves
from workers.protocol.engines.sglang import SGLANG, TABLE, parallel_words, ranks

ENTRY = Path(__file__).with_name("entry.py")
NCCL = "nccl"
_DERIVED_PORTS = 7
"""SGLang counts upwards from the rendezvous port for what its data-parallel ranks talk by."""
_SOCKET_NAME_CHARACTERS = len("tmp12345678")
"""Its processes talk by sockets that are named as Python names temporary files."""
_NEEDS = {
    **dict.fromkeys(
        ("hicache_ratio", "hicache_size", "hicache_write_policy", "hicache_storage_backend"),
        "enable_hierarchical_cache",
    ),
    "deepep_config": "moe_a2a_backend",
    "lmcache_cpu_gb": "enable_lmcache",
}


def check_options(options: EngineOptions, version: Version) -> None:
    """Raise `EngineOptionError`, naming the option and what would be right."""
    option_arguments(TABLE, options, version)
    require_with(options, _NEEDS)
    if options.get("kv_events") and options.get("disable_radix_cache"):
        raise EngineOptionError(
            "kv_events tell of cached prefixes, and disable_radix_cache is on", "kv_events"
        )
    if options.get("enable_lmcache") and options.get("enable_hierarchical_cache"):
        raise EngineOptionError(
            "enable_lmcache and enable_hierarchical_cache keep the same KV: choose one", "enable_lmcache"
        )
    tp, dp = whole(options, "tp_size", 1), whole(options, "dp_size", 1)
    if options.get("enable_dp_attention") and tp % dp:
        raise EngineOptionError(
            f"enable_dp_attention divides tp_size {tp} by dp_size {dp}, which leaves a rest", "dp_size"
        )


def port_blocks(options: EngineOptions) -> tuple[PortBlock, ...]:
    """What to lease: HTTP, the rendezvous with what is counted up from it, NCCL's, and those of events."""
    copies = whole(options, "dp_size", 1)
    blocks = [PortBlock(HTTP), PortBlock(RENDEZVOUS, 1 + _DERIVED_PORTS + copies), PortBlock(NCCL)]
    if options.get("kv_events"):
        blocks += [PortBlock(KV_EVENTS, copies), PortBlock(KV_REPLAY, copies)]
    return tuple(blocks)


def build_launch(options: EngineOptions, context: LaunchContext, install: EngineInstall) -> Launch:
    """Return the process to start. Raises `EngineOptionError`."""
    version = read_version(install.version)
    check_options(options, version)
    check_remote_code(options, context)
    check_socket_room(context, _SOCKET_NAME_CHARACTERS)
    check_accelerators(parallel_words(options), ranks(options), context)
    ports = first_ports(port_blocks(options), context.ports)
    arguments = [
        f"--model-path={context.model_dir}",
        f"--served-model-name={context.served_model_name}",
        f"--host={context.host}",
        f"--port={ports[HTTP]}",
        "--enable-metrics",
        # Else no answer says how much of its prompt was in cache.
        "--enable-cache-report",
        *_rendezvous_arguments(context, ports),
        *(["--device=cpu"] if context.accelerator_kind == "cpu" else []),
        *option_arguments(TABLE, options, version),
        *_event_arguments(options, ports),
    ]
    argv = (str(install.python), "-P", str(ENTRY), *arguments)
    environment = base_environment(install, context, TABLE, options) | kv_environment(options, context)
    environment |= {
        names.ENV_ENGINE_API_KEY: context.api_key,
        "SGLANG_HOST_IP": context.host,
        ENV_SESSION_MOVES: session_moves(SGLANG, options),
    }
    return Launch(argv, environment)


def _rendezvous_arguments(context: LaunchContext, ports: Mapping[str, int]) -> list[str]:
    nccl = f"--nccl-port={ports[NCCL]}"
    rank = context.rank
    if rank is None:
        return [nccl, f"--dist-init-addr={in_url(context.host)}:{ports[RENDEZVOUS]}"]
    return [
        nccl,
        f"--dist-init-addr={in_url(rank.master_host)}:{rank.master_port}",
        f"--nnodes={rank.nodes}",
        f"--node-rank={rank.rank}",
    ]


def _event_arguments(options: EngineOptions, ports: Mapping[str, int]) -> list[str]:
    if not options.get("kv_events"):
        return []
    settings = {
        "publisher": "zmq",
        "endpoint": event_endpoint(ports[KV_EVENTS]),
        "replay_endpoint": event_endpoint(ports[KV_REPLAY]),
        "topic": KV_TOPIC,
    }
    return [f"--kv-events-config={json.dumps(settings, separators=(',', ':'))}"]
