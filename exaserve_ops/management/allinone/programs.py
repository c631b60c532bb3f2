"""What the all-in-one fleet consists of, decided before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from exaserve_ops.adapters.processes import FLEET_VARIABLE, PROGRAM_VARIABLE
from exaserve_ops.adapters.supervision import Program

POSTGRES = "postgres"
VALKEY = "valkey"
WEB = "web"
CONTROLLERS = "controllers"
GATEWAY = "gateway"
CHORES = "chores"
BEAT = "beat"
LOAD = "load"
AGENT_PREFIX = "agent-"
NODE_PREFIX = "node-"

LOOPBACK = "127.0.0.1"
AGENT_PORTS = range(30_000, 32_768)
"""Below the ephemeral range, cut into one slice for each node of this machine."""
MEMORY_SHARE = 0.8
"""How much of the host's memory all nodes of this machine may give to replicas, together."""
_LARGEST_SLICE = 200


@dataclass(frozen=True, slots=True)
class FleetShape:
    """How large a fleet to start, and on what machine."""

    nodes: int
    replicas_per_node: int
    with_demo: bool
    with_load: bool
    cpu_count: int
    memory_bytes: int

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the nodes that run on this machine."""
        return tuple(f"{NODE_PREFIX}{number}" for number in range(1, self.nodes + 1))

    @property
    def replicas(self) -> int:
        """Replicas of the demo deployment on all nodes."""
        return self.nodes * self.replicas_per_node


@dataclass(frozen=True, slots=True)
class FleetAddresses:
    """Where the parts of the fleet find one another. The store addresses hold passwords."""

    database_url: str
    redis_url: str
    web_port: int
    gateway_port: int
    public_url: str

    @property
    def web_url(self) -> str:
        """Address of the web process on this machine."""
        return f"http://{LOOPBACK}:{self.web_port}"

    @property
    def gateway_url(self) -> str:
        """Address of the gateway on this machine."""
        return f"http://{LOOPBACK}:{self.gateway_port}"


@dataclass(frozen=True, slots=True)
class FleetSecrets:
    """Secrets that go into environments, never onto command lines."""

    secret_key: str
    fleet_secret: str


@dataclass(frozen=True, slots=True)
class FleetSite:
    """Folders that programs are told of."""

    fleet_id: str
    code: Path
    var: Path
    homes: Mapping[str, Path]
    """Home folder of each node's agent, by the node's name."""
    inference_key_file: Path
    tuning: Mapping[str, str] = field(default_factory=dict)
    """What the person at the terminal set for gateway and agents, such as `EXAOPS_AGENT_LABELS`."""


def control_environment(site: FleetSite, addresses: FleetAddresses, secrets: FleetSecrets) -> dict[str, str]:
    """Environment of what belongs to the control plane and may see its secrets."""
    return {
        "DJANGO_SETTINGS_MODULE": "exaserve_ops.settings.dev",
        "EXAOPS_VAR_DIR": str(site.var),
        "DATABASE_URL": addresses.database_url,
        "REDIS_URL": addresses.redis_url,
        "EXAOPS_SECRET_KEY": secrets.secret_key,
        "EXAOPS_FLEET_SECRET": secrets.fleet_secret,
        "EXAOPS_PUBLIC_URL": addresses.public_url,
        "EXAOPS_WEB_PORT": str(addresses.web_port),
        "EXAOPS_GATEWAY_PORT": str(addresses.gateway_port),
        # Nodes of this machine are reached by loopback; those of others join from elsewhere.
        "EXAOPS_ALLOW_LOCAL_ADDRESSES": "on",
        "EXAOPS_COMPILED_FOLDERS": str(site.var / "compiled"),
        **_tuning(site, "EXAOPS_COMPILED_FOLDERS"),
        **_tuning(site, "EXAOPS_SSH_"),
        **_tuning(site, "EXAOPS_WHEELHOUSE"),
        # What nodes of other machines are told: the embedded store's own address is of this machine.
        **_tuning(site, "EXAOPS_AGENT_REDIS_URL"),
        **_tuning(site, "EXAOPS_REDIS_NODE_USERS"),
    }


def store_programs(
    site: FleetSite, postgres: tuple[str, ...] | None, valkey: tuple[str, ...] | None
) -> tuple[Program, ...]:
    """Return the embedded stores; `None` stands for a store that somebody else runs."""
    programs = []
    if postgres is not None:
        # SIGINT is Postgres's fast stop: open transactions are rolled back, nothing is lost.
        programs.append(_program(site, POSTGRES, postgres, stop_signal="INT", stop_seconds=60))
    if valkey is not None:
        programs.append(_program(site, VALKEY, valkey, stop_seconds=30))
    return tuple(programs)


def control_programs(site: FleetSite, environment: Mapping[str, str]) -> tuple[Program, ...]:
    """Return web, controllers and chores."""
    web = _python(
        "-m", "uvicorn", "exaserve_ops.asgi:application",
        "--host", LOOPBACK, "--port", environment["EXAOPS_WEB_PORT"],
        "--ws", "websockets", "--no-server-header", "--timeout-graceful-shutdown", "3",
    )  # fmt: skip
    celery = ("-m", "celery", "-A", "exaserve_ops")
    chores = _python(*celery, "worker", "-Q", "chores", "-P", "threads", "-c", "2",
                     "-n", "chores@%h", "--without-gossip", "--without-mingle", "-l", "INFO")  # fmt: skip
    beat = _python(*celery, "beat", "-s", str(site.var / "beat-schedule"), "--pidfile=", "-l", "INFO")
    controllers = _python("manage.py", "run_controllers")
    return (
        _program(site, WEB, web, environment),
        _program(site, CONTROLLERS, controllers, environment, stop_seconds=15),
        _program(site, CHORES, chores, environment, stop_seconds=15),
        _program(site, BEAT, beat, environment),
    )


def gateway_program(site: FleetSite, environment: Mapping[str, str]) -> Program:
    """Return the gateway, which sees neither the database nor Django's key."""
    seen = ("REDIS_URL", "EXAOPS_FLEET_SECRET", "EXAOPS_GATEWAY_PORT")
    # A person waits for the stop, and asks for it on purpose: open answers get a moment, not long.
    drain = {"EXAOPS_GATEWAY_DRAIN_SECONDS": "8"}
    return _program(
        site,
        GATEWAY,
        _python("-m", "exaserve_ops.gateway"),
        drain | _tuning(site, "EXAOPS_GATEWAY_") | {name: environment[name] for name in seen},
        stop_seconds=12,
    )


def agent_programs(site: FleetSite, shape: FleetShape) -> tuple[Program, ...]:
    """Return one agent for each node; each learns all it may know when it joins."""
    width = min(_LARGEST_SLICE, len(AGENT_PORTS) // max(1, shape.nodes))
    agents = []
    for index, name in enumerate(shape.node_names):
        first = AGENT_PORTS.start + index * width
        environment = {
            "EXAOPS_AGENT_PORTS": f"{first}-{first + width - 1}",
            "EXAOPS_AGENT_MEMORY_BYTES": str(int(shape.memory_bytes * MEMORY_SHARE / shape.nodes)),
            # As with the addresses of nodes: a hub or bucket to try things with is on this machine. The
            # cloud's metadata service is not, and stays refused.
            "EXAOPS_AGENT_WEIGHTS_LOCAL_SOURCES": "true",
            "EXAOPS_AGENT_CPU_THREADS": str(max(1, shape.cpu_count // max(1, shape.replicas))),
            # Nothing is nearer to one another than nodes on one machine: a replica may span them.
            "EXAOPS_AGENT_LABELS": "supernode=this-machine",
        }
        environment |= _tuning(site, "EXAOPS_AGENT_")
        command = _python("-m", "workers.agent", "run", "--home", str(site.homes[name]))
        agents.append(_program(site, agent_name(name), command, environment, stop_seconds=20))
    return tuple(agents)


def load_program(site: FleetSite, addresses: FleetAddresses) -> Program:
    """Return the bounded background load; it starts over when its sessions are done."""
    command = _python(
        "-m", "bench.chat_load", "--url", addresses.gateway_url,
        "--key-file", str(site.inference_key_file), "--sessions", "10", "--seconds", "3600",
    )  # fmt: skip
    return _program(site, LOAD, command)


def agent_name(node_name: str) -> str:
    """Program name of the agent of a node: `agent-1` for `node-1`."""
    return node_name.replace(NODE_PREFIX, AGENT_PREFIX)


def stop_stages(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Order in which to stop these programs; those of one stage stop together.

    First whoever brings work, then whoever does it, last whoever keeps what it came to.
    """
    known = sorted(names)
    agents = tuple(name for name in known if name.startswith(AGENT_PREFIX))
    # The controllers go soon after the agents: left alone with silent nodes, they would declare them dead.
    control = (BEAT, CHORES, CONTROLLERS)
    order = ((LOAD,), (GATEWAY,), agents, control, (WEB,), (VALKEY,), (POSTGRES,))
    stages = (tuple(name for name in stage if name in known) for stage in order)
    return tuple(stage for stage in stages if stage)


def _tuning(site: FleetSite, prefix: str) -> dict[str, str]:
    return {name: value for name, value in site.tuning.items() if name.startswith(prefix)}


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def _program(
    site: FleetSite,
    name: str,
    command: tuple[str, ...],
    environment: Mapping[str, str] | None = None,
    *,
    stop_signal: str = "TERM",
    stop_seconds: int = 10,
) -> Program:
    label = {FLEET_VARIABLE: site.fleet_id, PROGRAM_VARIABLE: name, "PYTHONUNBUFFERED": "1"}
    return Program(
        name=name,
        command=command,
        environment=dict(environment or {}) | label,
        stop_signal=stop_signal,
        stop_seconds=stop_seconds,
        folder=site.code,
    )
