"""Protocol v1: every message between the control plane and an agent.

Strict out, tolerant in: a receiver ignores fields it does not know and refuses a `kind` it does not
know with `UnknownMessageError`. A minor version only ever adds optional fields, so an agent that is
one minor behind goes on working. Bytes that were once released stay in `tests/protocol/golden` and
must decode for ever.

Every message travels in an `Envelope`, sealed with a key that only the control plane and that one
node can derive (`workers.protocol.digests`), so neither a stranger with access to the broker nor
another node can speak for a node or command it.
"""

from __future__ import annotations

import enum
import hmac
from typing import TypeAlias, TypeVar

import msgspec

from workers.protocol import digests
from workers.protocol.kv_pools import KvPool

MAJOR = 1
MINOR = 4
"""1: accelerators tell where they sit and what slice they are; Hello has topology and probe notes.
2: a replica has a stall limit; it may be seen stalled, or held up by processes on its memory.
3: Hello has cards that are cut into slices, and links as they are now; unknown processes say whose
they are.
4: a replica's load has its KV tiers, what moved between them, and why prefixes were missed; a
heartbeat has the node's pools of KV blocks, and a replica's limits in them can be changed; a replica may
have an MPS share, and Hello says whether the node can give one; a session's KV can be sent to another
replica."""

MAX_MESSAGE_BYTES = 256 * 1024
"""Upper bound of one encoded message: larger payloads (logs, weights) have paths of their own."""


class ProtocolError(Exception):
    """A message that cannot be accepted."""


class UnknownMessageError(ProtocolError):
    """The kind or the major version is not one this side knows; upgrade the older side."""


class MalformedMessageError(ProtocolError):
    """The bytes are no message of this protocol."""


class ForgedMessageError(ProtocolError):
    """The seal does not fit: the sender does not hold this node's key."""


class _Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all parts: immutable, by keyword, defaults left off the wire."""


# ------------------------------------------------------------------------------------------------
# Parts
# ------------------------------------------------------------------------------------------------
class AcceleratorInfo(_Struct, frozen=True, kw_only=True):
    """One accelerator as the node's probe found it."""

    uuid: str
    kind: str
    """`cuda`, `rocm`, `xpu` or `cpu`: what the engine will run on, as discovered."""
    name: str
    memory_bytes: int
    """0 where the tool did not say; then `unreadable` has `memory_bytes`."""
    ordinal: int = 0
    """The vendor tool's index. For people; nothing is ever placed by it."""
    parent_uuid: str = ""
    """The card that this slice was cut from; empty for a whole card. Since 1.1, as all below."""
    profile: str = ""
    """What the slice was cut as, such as `3g.40gb`."""
    pci_bus_id: str = ""
    numa_node: int | None = None
    pcie_generation: int | None = None
    """The best that card and slot can do together, as is `pcie_width`."""
    pcie_width: int | None = None
    unreadable: tuple[str, ...] = ()
    """Fields of this struct that the vendor's tool could not tell."""
    pcie_generation_now: int | None = None
    """As negotiated; an idle card goes down to save power. Since 1.3, as `pcie_width_now`."""
    pcie_width_now: int | None = None
    """As negotiated; less than `pcie_width` is lanes that failed, or a slot that has fewer."""
    shares_memory: bool = False
    """Replicas with the same weights hold them on it once. Since 1.4; a CPU's replicas do so anyway."""


class TopologyEndpoint(_Struct, frozen=True, kw_only=True):
    """One end of links: an accelerator or a network adapter."""

    name: str
    """UUID of the accelerator, or the adapter's device name such as `mlx5_0`."""
    accelerator: bool
    numa_node: int | None = None
    cpus: str = ""
    """Cores next to it, such as `0-31,64-95`."""


class TopologyLink(_Struct, frozen=True, kw_only=True):
    """The way between two endpoints, by their places in the list."""

    a: int
    b: int
    kind: str
    """`NV#` (# bonded NVLinks), `PIX`, `PXB`, `PHB`, `NODE` or `SYS`."""
    rank: int
    """For comparing: a smaller rank is a shorter way."""


class Topology(_Struct, frozen=True, kw_only=True):
    """How near accelerators and network adapters of one node are to one another."""

    endpoints: tuple[TopologyEndpoint, ...] = ()
    links: tuple[TopologyLink, ...] = ()


class ModelFile(_Struct, frozen=True, kw_only=True):
    """One file of a model: path relative to the model folder."""

    path: str
    size_bytes: int
    sha256: str


class ModelRef(_Struct, frozen=True, kw_only=True):
    """Weights and tokenizer, named by digest, and where the node finds them."""

    name: str
    digest: str
    source: str
    """`file:///absolute/folder`: a folder or mount that the node can read."""
    files: tuple[ModelFile, ...] = ()


class WantedState(enum.Enum):
    """What the control plane wants of a replica."""

    RUN = "run"
    DRAIN = "drain"
    """Take nothing new, let open requests end, then stop; the deadline is `drain_seconds`."""
    STOP = "stop"


class MpsLimits(_Struct, frozen=True, kw_only=True):
    """A replica's share of its accelerators under NVIDIA's Multi-Process Service. 0: no such limit.

    Since 1.4.
    """

    thread_percent: int = 0
    memory_bytes: int = 0
    """Of each of its accelerators."""


class ReplicaSpec(_Struct, frozen=True, kw_only=True):
    """One replica as this node should run it."""

    replica_id: str
    deployment: str
    generation: int
    """Rises with every change of the wish; an older one than already applied is ignored."""
    wanted: WantedState
    model: ModelRef
    engine: str
    engine_options: dict[str, str | int | float | bool] = {}
    accelerator_uuids: tuple[str, ...] = ()
    memory_bytes: int = 0
    drain_seconds: float = 60.0
    start_seconds: float = 300.0
    """How long start-up may take before the attempt counts as failed."""
    stall_seconds: float = 60.0
    """Requests run and no token comes for so long: the attempt counts as crashed. 0: never."""
    mps: MpsLimits | None = None
    """It runs as a client of the node's MPS control daemon, within these limits. Since 1.4."""


class ExitInfo(_Struct, frozen=True, kw_only=True):
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


class KvTier(_Struct, frozen=True, kw_only=True):
    """One tier of a replica's KV blocks, in blocks of `kv_block_tokens`. Since 1.4."""

    name: str
    """`accelerator` (where it computes, be that a CPU), `host` or `disk`."""
    used_blocks: int
    """Live ones and cached ones."""
    capacity_blocks: int
    """0 for a tier that was asked for and is off; then `off_reason` says why."""
    off_reason: str = ""


class KvSwaps(_Struct, frozen=True, kw_only=True):
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


class ReplicaTelemetry(_Struct, frozen=True, kw_only=True):
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


class ReplicaObserved(_Struct, frozen=True, kw_only=True):
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


class UnknownProcess(_Struct, frozen=True, kw_only=True):
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


class AgentLiveness(_Struct, frozen=True, kw_only=True):
    """Age of the last sign of life of each part of the agent, on the monotonic clock."""

    intake_age_seconds: float | None = None
    """Since the last command was taken in; the control plane resends the wish as a canary."""
    intake_restarts: int = 0
    reconcile_age_seconds: float | None = None
    reconcile_restarts: int = 0
    reconcile_error: str = ""


class HostTelemetry(_Struct, frozen=True, kw_only=True):
    """The node itself."""

    cpu_used_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    load1: float | None = None
    network_receive_bytes_per_second: float | None = None
    network_send_bytes_per_second: float | None = None


# ------------------------------------------------------------------------------------------------
# Reports: agent -> control plane
# ------------------------------------------------------------------------------------------------
class Hello(_Struct, frozen=True, kw_only=True, tag_field="kind", tag="hello"):
    """An agent introduces itself: at its start, and after each reconnect."""

    node_id: str
    boot_id: str
    """New for every start of the agent process."""
    major: int
    minor: int
    agent_version: str
    hostname: str
    address: str
    """Where the node's replicas are reached; the control plane may replace an unusable one."""
    accelerators: tuple[AcceleratorInfo, ...] = ()
    engines: tuple[str, ...] = ()
    cpu_count: int = 0
    memory_bytes: int = 0
    labels: dict[str, str] = {}
    simulated: bool = False
    reconnect: bool = False
    topology: Topology | None = None
    """Since 1.1; `None` where no tool tells."""
    probe_notes: tuple[str, ...] = ()
    """What the probes could not find out, for people. Since 1.1."""
    split_cards: tuple[AcceleratorInfo, ...] = ()
    """Cards in MIG mode: only their slices, which stand among the accelerators, can be used. Since 1.3."""
    mps_ready: bool = False
    """An MPS control daemon answers, so replicas can have MPS shares. Since 1.4, as `mps_note`."""
    mps_note: str = ""
    """What keeps MPS from being used, and what to do; empty where nothing does."""


class Heartbeat(_Struct, frozen=True, kw_only=True, tag_field="kind", tag="heartbeat"):
    """Sign of life and the whole observed state of a node, once a second."""

    node_id: str
    boot_id: str
    lease_epoch: int
    sequence: int
    sent_at_seconds: float
    """The node's wall clock. Used to show skew, never to judge life."""
    applied_revision: int
    """Revision of the last wish that was applied in full."""
    liveness: AgentLiveness
    replicas: tuple[ReplicaObserved, ...] = ()
    unknown_processes: tuple[UnknownProcess, ...] = ()
    host: HostTelemetry | None = None
    kv_pools: tuple[KvPool, ...] = ()
    """Pools of KV blocks that replicas of the node share. Since 1.4."""


class CommandResult(_Struct, frozen=True, kw_only=True, tag_field="kind", tag="command_result"):
    """What became of a command."""

    node_id: str
    command_id: str
    outcome: str
    """`done`, `refused` (older epoch or generation, past its deadline) or `failed`."""
    reason: str = ""


class LogChunk(_Struct, frozen=True, kw_only=True, tag_field="kind", tag="log_chunk"):
    """Lines of a replica's log, asked for by `TailLog`, batched at most four times a second."""

    node_id: str
    replica_id: str
    attempt: int
    lines: tuple[str, ...]
    dropped_lines: int = 0
    """Lines left out since the last chunk because the log grew faster than the cap."""


class SessionSent(_Struct, frozen=True, kw_only=True, tag_field="kind", tag="session_sent"):
    """What became of a `MoveSession` that was begun. Since 1.4."""

    node_id: str
    command_id: str
    code: str = ""
    """Empty: the target has it. Else the engine's word for why not, or `engine_unreachable`."""
    reason: str = ""
    blocks: int = 0
    """Of the session at its source, full ones."""
    sent_blocks: int = 0
    """Without those that the target had already."""
    sent_bytes: int = 0
    target_tokens: int = 0
    """Of the session that the target has now."""
    seconds: float = 0.0
    turn_began: bool = False
    """At the source, meanwhile: the target has only what was there before."""


Report: TypeAlias = Hello | Heartbeat | CommandResult | LogChunk | SessionSent


# ------------------------------------------------------------------------------------------------
# Commands: control plane -> agent
# ------------------------------------------------------------------------------------------------
class _Command(_Struct, frozen=True, kw_only=True):
    command_id: str
    lease_epoch: int
    deadline_seconds: float
    """Worth of the command in seconds from when it was sent; judged by the age of the message on
    the queue as the agent can know it, so it bounds work, not safety (epochs do that)."""


class ApplyDesired(_Command, frozen=True, kw_only=True, tag_field="kind", tag="apply_desired"):
    """The node's whole wish. Sent on each change, at each Hello, and regularly as a canary."""

    revision: int
    """Rises with every change of the node's wish; an older one than already applied is ignored."""
    replicas: tuple[ReplicaSpec, ...] = ()


class RequestHello(_Command, frozen=True, kw_only=True, tag_field="kind", tag="request_hello"):
    """The control plane does not accept this node's lease any more: introduce yourself again."""

    reason: str


class TailLog(_Command, frozen=True, kw_only=True, tag_field="kind", tag="tail_log"):
    """Send the log of a replica for `seconds`; sent again while somebody still reads."""

    replica_id: str
    seconds: float
    backlog_lines: int = 200


class EndProcess(_Command, frozen=True, kw_only=True, tag_field="kind", tag="end_process"):
    """End a process that this agent left behind; refused unless that is proven. Since 1.3."""

    pid: int
    start_ticks: int
    """As reported: the pid alone may have been given to another process since."""


class SetKvLimits(_Command, frozen=True, kw_only=True, tag_field="kind", tag="set_kv_limits"):
    """Change what a running replica may have of its node's KV pool; until it is started anew. Since 1.4."""

    replica_id: str
    minimum_blocks: int
    """Guaranteed. Rounded up to whole extents, as is the ceiling."""
    ceiling_blocks: int


class MoveSession(_Command, frozen=True, kw_only=True, tag_field="kind", tag="move_session"):
    """Have a replica send a session's KV to another one; answered by `SessionSent`. Since 1.4.

    The deadline bounds the sending. The session stays whole where it is, whatever comes of it.
    """

    replica_id: str
    attempt: int
    session_id: str
    transfer_id: str
    """32 hex digits; the target takes each only once."""
    transfer_key: str
    """64 hex digits: `digests.transfer_key` of the target's engine. Opens this one transfer."""
    target: str
    """`http://host:port` of the engine that is to have it."""
    bytes_per_second: float = 0.0
    """0: as fast as it goes."""


class LetSessionGo(_Command, frozen=True, kw_only=True, tag_field="kind", tag="let_session_go"):
    """Say to a replica that a session lives elsewhere: its blocks go before others'. Since 1.4."""

    replica_id: str
    attempt: int
    session_id: str


class ForgetReplica(_Command, frozen=True, kw_only=True, tag_field="kind", tag="forget_replica"):
    """The end of a replica is recorded: drop it from the journal (its log is kept a while)."""

    replica_ids: tuple[str, ...]


Command: TypeAlias = (
    ApplyDesired
    | RequestHello
    | TailLog
    | EndProcess
    | SetKvLimits
    | MoveSession
    | LetSessionGo
    | ForgetReplica
)

_Message = TypeVar("_Message")


# ------------------------------------------------------------------------------------------------
# Envelope
# ------------------------------------------------------------------------------------------------
class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """On the wire: the major version, whose message it is, the encoded body, its seal."""

    major: int
    node_id: str
    body: bytes
    seal: bytes


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode_report(report: Report, *, node_id: str, node_key: bytes) -> bytes:
    """Encode and seal a report. Raises `MalformedMessageError` if it is over the size bound."""
    return _seal(_encoder.encode(report), node_id, digests.report_key(node_key))


def encode_command(command: Command, *, node_id: str, node_key: bytes) -> bytes:
    """Encode and seal a command. Raises `MalformedMessageError` if it is over the size bound."""
    return _seal(_encoder.encode(command), node_id, digests.command_key(node_key))


def open_envelope(data: bytes) -> Envelope:
    """Read the outer layer, so that the receiver knows whose key to check the seal with.

    Raises `MalformedMessageError` for other bytes and `UnknownMessageError` for another major.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(f"message of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
    try:
        envelope = _envelope_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise MalformedMessageError(f"not an envelope: {error}") from error
    if envelope.major != MAJOR:
        raise UnknownMessageError(f"protocol major {envelope.major}; this side speaks {MAJOR}")
    return envelope


def decode_report(envelope: Envelope, *, node_key: bytes) -> Report:
    """Check the seal and decode a report. Raises a `ProtocolError` that says what is wrong."""
    _check_seal(envelope, digests.report_key(node_key))
    return _decode(_report_decoder, envelope.body)


def decode_command(envelope: Envelope, *, node_key: bytes) -> Command:
    """Check the seal and decode a command. Raises a `ProtocolError` that says what is wrong."""
    _check_seal(envelope, digests.command_key(node_key))
    return _decode(_command_decoder, envelope.body)


def _seal(body: bytes, node_id: str, key: bytes) -> bytes:
    data = _encoder.encode(Envelope(MAJOR, node_id, body, digests.seal(key, node_id, body)))
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(f"message of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
    return data


def _check_seal(envelope: Envelope, key: bytes) -> None:
    expected = digests.seal(key, envelope.node_id, envelope.body)
    if not hmac.compare_digest(envelope.seal, expected):
        raise ForgedMessageError(f"bad seal on a message for node {envelope.node_id}")


def _decode(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if "Invalid value" in str(error) and "kind" in str(error):
            raise UnknownMessageError(f"kind not known to this side: {error}") from error
        raise MalformedMessageError(str(error)) from error
    except msgspec.DecodeError as error:
        raise MalformedMessageError(str(error)) from error
