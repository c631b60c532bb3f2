"""A node and its replicas as the agent sees them: the parts of a heartbeat."""

from __future__ import annotations

import enum

from workers.protocol.machine import RdmaRate
from workers.protocol.part import Part


class ExitInfo(Part, frozen=True, kw_only=True):
    """How an engine's main process ended."""

    attempt: int
    code: int | None = None
    signal: int | None = None
    duration_seconds: float = 0.0
    log_tail: tuple[str, ...] = ()
    why: str = ""
    """Why it ended, where its agent ended it: `stalled: ...`; else how it ended, in words."""


class ObservedState(enum.Enum):
    """What the agent sees of a replica."""

    WAITING = "waiting"
    """Not launched yet; the reason says what it waits for."""
    STARTING = "starting"
    """The process runs and has not opened its port."""
    LOADING = "loading"
    """The port is open and the engine says that it is not ready."""
    READY = "ready"
    BACKING_OFF = "backing_off"
    """The last attempt ended; the next one starts when the back-off is over."""
    FAILED = "failed"
    """The crash-loop limit is reached; a new generation starts afresh."""
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    """The whole process group is gone."""


class KvTier(Part, frozen=True, kw_only=True):
    """One tier of a replica's KV blocks, in blocks of `kv_block_tokens`. Since 1.4."""

    name: str
    """`accelerator` (where it computes, be that a CPU), `host` or `disk`."""
    used_blocks: int
    """Live ones and cached ones."""
    capacity_blocks: int
    """0 for a tier that was asked for and is off; then `off_reason` says why."""
    off_reason: str = ""


class KvSwaps(Part, frozen=True, kw_only=True):
    """What moved between the tiers since the engine's start. Since 1.4."""

    blocks_in: int = 0
    """From host or disk back to where the engine computes."""
    blocks_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    fetch_waits: int = 0
    """Requests that waited for blocks to come back."""
    checksum_failures: int = 0
    """Blocks on disk that were not what was written; they were computed again."""
    preemptions_recompute: int = 0
    """Requests set back whose tokens are computed again."""
    preemptions_swap: int = 0
    """Requests set back whose blocks were kept in a lower tier."""


class ReplicaTelemetry(Part, frozen=True, kw_only=True):
    """One replica's load over a sliding window; `None` means that the engine did not say.

    Ratios are 0-1. Quantiles are over `window_seconds` and absent where nothing finished in it.
    """

    window_seconds: float
    age_seconds: float = 0.0
    """Age of the newest successful scrape when the heartbeat was made."""
    requests_running: int | None = None
    requests_waiting: int | None = None
    kv_used_ratio: float | None = None
    kv_total_blocks: int | None = None
    kv_block_tokens: int | None = None
    requests_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    prefix_hit_ratio: float | None = None
    ttft_p50_seconds: float | None = None
    ttft_p95_seconds: float | None = None
    ttft_p99_seconds: float | None = None
    itl_p50_seconds: float | None = None
    itl_p95_seconds: float | None = None
    generation_tokens_total: float | None = None
    requests_total: float | None = None
    prefix_query_tokens_total: float | None = None
    prefix_hit_tokens_total: float | None = None
    notes: tuple[str, ...] = ()
    """Data-quality notes, such as `metrics disabled (404)` or `2 lines dropped`."""
    kv_tiers: tuple[KvTier, ...] = ()
    """The accelerator's first; empty where the engine does not tell. Since 1.4, as all below."""
    kv_swaps: KvSwaps | None = None
    """`None`: the engine has no tiers."""
    kv_thrash_reason: str = ""
    """Why nothing is swapped now, and requests queue instead; empty: all is well."""
    prefix_miss_tokens_total: dict[str, float] = {}
    """Prompt tokens not in cache, by reason: `no_shared_prefix`, `shorter_than_a_block`, `evicted`."""
    kv_evicted_idle_seconds: float | None = None
    """How long before the scrape the block evicted last had been used: what was used later is still cached.
    Absent where nothing was evicted for lack of room, or goes to a lower tier. Since 1.5."""
    lower_bounds: tuple[str, ...] = ()
    """Quantiles above that are at least what they say: they lie beyond the engine's last bucket. Since 1.6,
    as all below."""
    queue_p50_seconds: float | None = None
    queue_p95_seconds: float | None = None
    waiting_by_reason: dict[str, float] = {}
    """Requests in the queue by why they wait; empty where all wait for the same, or none does."""
    sleep_state: str = ""
    """`awake`, or what the engine has let go: `weights_offloaded`, `discard_all`; empty: not told."""
    kv_cached_tokens: int | None = None
    """Tokens of distinct prefixes in cache, of an engine that publishes which blocks come and go."""
    kv_capacity_tokens: int | None = None
    kv_capacity_is_estimate: bool = False
    """Worked out of labels that need not hold for every layer of the model."""
    external_hit_ratio: float | None = None
    """Of what was looked for in a cache beyond the engine's own, in the window."""
    external_hit_tokens_total: float | None = None
    preemptions_total: float | None = None
    preemptions_per_second: float | None = None
    outcomes_total: dict[str, float] = {}
    """How requests ended, without those that none did: `stop`, `length`, `abort`, `error`, `rejected`."""
    connector_totals: dict[str, float] = {}
    """What went through a KV connector since the engine's start, in words, without zeros."""
    generation_tokens_by_model: dict[str, float] = {}
    """Totals, only where an engine serves several models: a base model and what is fine-tuned on it."""


class MemoryHolder(Part, frozen=True, kw_only=True):
    """Who is in the way of a launch. Since 1.6."""

    kind: str
    """`stranger`, `leaving` (a replica that is ending), `running` (one that has more than it is promised), or
    `unnamed`: in use by no process that is named, such as memory that the driver has yet to give back."""
    pid: int = 0
    replica_id: str = ""
    command: str = ""
    memory_bytes: int | None = None


class MemoryWait(Part, frozen=True, kw_only=True):
    """A launch waits until memory is seen to be free. Since 1.6."""

    place: str
    """The accelerator, or `host`."""
    needed_bytes: int
    free_bytes: int
    total_bytes: int
    waited_seconds: float = 0.0
    at_most_seconds: float | None = None
    """Then it is launched all the same; `None`: strangers keep it out, and only the fleet can help."""
    holders: tuple[MemoryHolder, ...] = ()


class ReplicaObserved(Part, frozen=True, kw_only=True):
    """One replica as the agent sees it now."""

    replica_id: str
    generation: int
    state: ObservedState
    attempt: int = 0
    restarts: int = 0
    reason: str = ""
    pid: int | None = None
    address: str = ""
    """`host:port` (IPv6 host in brackets) where the engine answers, set once the port is leased."""
    ports: tuple[int, ...] = ()
    uptime_seconds: float = 0.0
    """Since this attempt's process started."""
    start_took_seconds: float | None = None
    """From launch to ready, of this attempt."""
    retry_in_seconds: float | None = None
    active_requests: int | None = None
    last_exit: ExitInfo | None = None
    telemetry: ReplicaTelemetry | None = None
    stalled: bool = False
    """Requests ran and no token came for its stall limit; the agent ends and restarts it."""
    held_by_pids: tuple[int, ...] = ()
    """Processes that hold the memory, or are left of the last attempt, that it waits for."""
    memory_used_bytes: int | None = None
    """Really taken: of its cards all together, or of the machine's on a CPU. Since 1.4."""
    memory_wait: MemoryWait | None = None
    """What a launch that was promised its memory waits for. Since 1.6."""
    member_number: int = 0
    """Which part of a replica over several nodes this is; 0 also where one node runs all. Since 1.7, as all
    below."""
    epoch: int = 0
    """Of the start that its state is about (the last exit may be an earlier one's); 0: one node runs all."""
    rendezvous: str = ""
    """`host:port` where the members of this epoch find each other: told by the head once it is leased."""
    sleep_state: str = ""
    """Empty: awake. Else one of `engines.sleeping`'s states; `ready` says only that it can be woken then."""
    sleep_note: str = ""
    """Why it is awake though it is to sleep."""
    woke_in_seconds: float | None = None
    """From the wish to answering, when it was woken last; `None`: this attempt was not."""


class UnknownProcess(Part, frozen=True, kw_only=True):
    """Carries our launch label or sits on our accelerator, and is no known replica."""

    pid: int
    replica_id: str = ""
    accelerator_uuid: str = ""
    memory_bytes: int = 0
    command: str = ""
    start_ticks: int = 0
    """When it started, in clock ticks since boot: with the pid, names it. Since 1.3, as all below."""
    user: str = ""
    """Who runs it; empty where that is not known."""
    left_over: bool = False
    """Proven to be what this agent started and no open attempt knows: it may be ended."""
    origin: str = ""
    """What proves that, or why it is not proven, in words."""


class AgentLiveness(Part, frozen=True, kw_only=True):
    """Age of the last sign of life of each part of the agent, on the monotonic clock."""

    intake_age_seconds: float | None = None
    """Since the last command was taken in; the control plane resends the wish as a canary."""
    intake_restarts: int = 0
    reconcile_age_seconds: float | None = None
    reconcile_restarts: int = 0
    reconcile_error: str = ""


class InterfaceRate(Part, frozen=True, kw_only=True):
    """What goes through one network interface. Since 1.6."""

    receive_bytes_per_second: float
    send_bytes_per_second: float
    link_bytes_per_second: float | None = None
    """What it carries each way, where its driver says; a virtual one has no speed. Since 1.7."""


class HostTelemetry(Part, frozen=True, kw_only=True):
    """The node itself."""

    cpu_used_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    load1: float | None = None
    network_receive_bytes_per_second: float | None = None
    network_send_bytes_per_second: float | None = None
    interfaces: dict[str, InterfaceRate] = {}
    """Of which the network figures above are the sum. Since 1.6, as all below."""
    disk_read_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None
    cpu_stalled_ratio: float | None = None
    """Share of the last ten seconds in which some task waited for a processor; the kernel's own figure, as
    the two below. `None`: this kernel does not say."""
    memory_stalled_ratio: float | None = None
    io_stalled_ratio: float | None = None
    cpu_busiest_ratio: float | None = None
    """Of the one core that was busiest: a single thread can be all that a server waits for.
    Since 1.7, as below."""
    rdma: dict[str, RdmaRate] = {}
    """By adapter and port, such as `mlx5_0/1`. The network figures above do not count these bytes."""
