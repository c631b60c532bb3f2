"""What keeps KV beside or behind an engine's own memory, as its options ask for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from workers.protocol.engines.sglang import SGLANG
from workers.protocol.engines.vllm import NIXL_CONNECTORS, VLLM

_IN_HOST_MEMORY = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
_LMCACHE = "LMCache"


def kv_beyond(engine: str, options: Mapping[str, object]) -> tuple[str, ...]:
    """Words for each place, nearest first; nothing for engines that keep all KV where they compute."""
    if engine == VLLM:
        places = [_vllm_offload(options), _connector(options)]
    elif engine == SGLANG:
        places = [_hierarchical(options), _lmcache(options) if options.get("enable_lmcache") else ""]
    else:
        return ()
    return tuple(place for place in (_shared_card(options), *places) if place)


def _shared_card(options: Mapping[str, object]) -> str:
    return "takes its card's memory as it needs it (kvcached)" if options.get("kvcached") else ""


def _vllm_offload(options: Mapping[str, object]) -> str:
    size = options.get("kv_offloading_size")
    if not size:
        return ""
    keeper = f", by {_LMCACHE}" if options.get("kv_offloading_backend") == "lmcache" else ""
    return f"{size} GiB of host memory{keeper}"


def _connector(options: Mapping[str, object]) -> str:
    name = str(options.get("kv_connector") or "")
    if not name or name in NIXL_CONNECTORS:
        return ""  # it moves KV, and keeps none
    if name in _IN_HOST_MEMORY:
        return f"host memory, by {name}"
    return _lmcache(options) if name.startswith(_LMCACHE) else f"what {name} reaches"


def _lmcache(options: Mapping[str, object]) -> str:
    size = options.get("lmcache_cpu_gb")
    return f"{size} GB of host memory for each rank, by {_LMCACHE}" if size else _LMCACHE


def _hierarchical(options: Mapping[str, object]) -> str:
    if not options.get("enable_hierarchical_cache"):
        return ""
    size, storage = options.get("hicache_size"), options.get("hicache_storage_backend")
    memory = f"{size} GB of host memory for each rank" if size else "host memory"
    return f"{memory}, then {storage}" if storage else memory
