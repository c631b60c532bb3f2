"""What the launches of engines that are no part of this product have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate

from workers.engines.base import EngineInstall, EngineOptions, LaunchContext, PortBlock
from workers.engines.collectives import collective_environment
from workers.protocol.engines.kinds import EngineOptionError
from workers.protocol.engines.option import EngineTable, read_environment

HTTP = "http"
KV_EVENTS, KV_REPLAY = "kv events", "kv replay"
KV_TOPIC = "kv-events"
ENV_SESSION_MOVES = "EXAOPS_SESSION_MOVES"
"""Tells `inside.exaops_moves`, in the engine's own process, what the engine was started for."""
ENV_NEEDS = "EXAOPS_ENGINE_NEEDS"
"""Modules that the engine's environment must have: what starts it looks for them first."""
_SOCKET_CHARACTERS = 107
"""Most of a Unix socket's address on Linux."""
_FALLBACK_PATH = "/usr/local/bin:/usr/bin:/bin"


def first_ports(blocks: Sequence[PortBlock], ports: Sequence[int]) -> dict[str, int]:
    """First port of each purpose, of ports that were leased for these blocks.

    Raises `ValueError` where there are not as many.
    """
    ends = tuple(accumulate(block.count for block in blocks))
    if not ends or len(ports) < ends[-1]:
        raise ValueError(f"{ends[-1] if ends else 1} ports are needed, {len(ports)} were leased")
    return {block.purpose: ports[end - block.count] for block, end in zip(blocks, ends, strict=True)}


def event_endpoint(port: int) -> str:
    """Where KV events are published: on loopback, since they tell what prompts consist of.

    Engines listen only where an address has `*` or `::` in it, and connect elsewhere; this one has both
    what they look for and no other reader than this node.
    """
    return f"tcp://[::ffff:127.0.0.1]:{port}"


def check_socket_room(context: LaunchContext, name_characters: int) -> None:
    """Raise `EngineOptionError` where the engine's sockets would have longer addresses than there can be.

    `name_characters`: of the longest name that it gives a socket in its temporary folder.
    """
    most = _socket_room(name_characters)
    told = len(str(context.runtime_dir))
    if told > most:
        raise EngineOptionError(
            f"the agent's home makes paths of {told} characters, and its sockets leave room for {most}: "
            "start the agent with a home that is nearer to the root"
        )


def _socket_room(name_characters: int) -> int:
    return _SOCKET_CHARACTERS - 1 - name_characters


def socket_folder(context: LaunchContext, name_characters: int) -> str:
    """Where the engine's processes talk by sockets: its runtime folder, in which it starts.

    Ranks of two agents on one machine find one another's only by the whole path. It may be longer than a
    socket's address, which is refused (`EngineOptionError`) where they are known to share a machine.
    """
    rank = context.rank
    if rank is None:
        return "."
    if len(str(context.runtime_dir)) <= _socket_room(name_characters):
        return str(context.runtime_dir)
    if len(set(rank.hosts)) < len(rank.hosts):
        check_socket_room(context, name_characters)
    return "."


def in_url(host: str) -> str:
    """A host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def base_environment(
    install: EngineInstall, context: LaunchContext, table: EngineTable, options: EngineOptions
) -> dict[str, str]:
    """Environment of an engine: clean, offline, with what the deployment sets; secrets are the adapter's.

    Raises `EngineOptionError`.
    """
    folder = str(context.runtime_dir)
    caches = str(context.engine_cache or context.runtime_dir)
    path = os.environ.get("PATH", _FALLBACK_PATH)
    return {
        **collective_environment(context.rank),
        **read_environment(table, options),
        # Compilers that its environment brings are found before the system's.
        "PATH": f"{install.python.parent}:{path}",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        # Names of KV blocks begin with a random value otherwise, another one in each process.
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": str(context.cpu_threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "XDG_CACHE_HOME": caches,
        "TRITON_CACHE_DIR": f"{caches}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "FLASHINFER_WORKSPACE_BASE": caches,
    }


def kv_environment(options: EngineOptions, context: LaunchContext) -> dict[str, str]:
    """Variables for what keeps KV in place of the engine or behind it. Raises `EngineOptionError`."""
    found: dict[str, str] = {}
    needs: list[str] = []
    if options.get("kvcached"):
        if context.accelerator_kind == "cpu":
            raise EngineOptionError(
                "kvcached maps memory of accelerators, and this replica has none", "kvcached"
            )
        needs.append("kvcached")
        found |= {
            "ENABLE_KVCACHED": "true",
            "KVCACHED_AUTOPATCH": "1",
            # Engines of one machine tell one another by it, and would read each other's limits otherwise.
            "KVCACHED_IPC_NAME": f"exaops-{context.replica_id}-{context.attempt}",
        }
    if "lmcache_cpu_gb" in options:
        found |= {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": str(options["lmcache_cpu_gb"])}
    if options.get("enable_lmcache") or str(options.get("kv_connector", "")).startswith("LMCache"):
        needs.append("lmcache")
    return found | ({ENV_NEEDS: " ".join(needs)} if needs else {})


def check_remote_code(options: EngineOptions, context: LaunchContext) -> None:
    """Raise `EngineOptionError` where code of the model's is to be run on a node that does not allow it."""
    if options.get("trust_remote_code") and not context.allows_remote_code:
        raise EngineOptionError(
            "trust_remote_code: this node runs no code that comes with a model; its operator can allow it "
            "with trust_remote_code = true in the agent's settings",
            "trust_remote_code",
        )


def check_accelerators(words: str, needed: int, context: LaunchContext) -> None:
    """Raise `EngineOptionError` unless the replica has as many accelerators here as its ranks need."""
    nodes = 1 if context.rank is None else context.rank.nodes
    here, rest = divmod(needed, nodes)
    if rest:
        raise EngineOptionError(f"{words} make {needed} ranks, which {nodes} nodes cannot share evenly")
    if context.accelerator_kind != "cpu" and here != len(context.accelerator_uuids):
        has = len(context.accelerator_uuids)
        raise EngineOptionError(f"{words} need {here} accelerators on this node, and the replica has {has}")


def require_with(options: EngineOptions, names: Mapping[str, str]) -> None:
    """Raise `EngineOptionError` for an option (key) that says nothing without another one (value)."""
    for name, other in names.items():
        if name in options and not options.get(other):
            raise EngineOptionError(f"{name} says nothing without {other}: set that, or leave it out", name)
