"""Protocol v1: every message between the control plane and an agent; their parts lie beside it.

Strict out, tolerant in: a receiver ignores fields it does not know and refuses a `kind` it does not
know with `UnknownMessageError`. A minor version only ever adds optional fields, so an agent that is
one minor behind goes on working. Bytes that were once released stay in `tests/protocol/golden` and
must decode for ever.

Every message travels in an `Envelope`, sealed with a key that only the control plane and that one
node can derive (`workers.protocol.digests`), so neither a stranger with access to the broker nor
another node can speak for a node or command it.
"""

from __future__ import annotations

import hmac
from typing import TypeAlias, TypeVar

import msgspec

from workers.protocol import digests
from workers.protocol.hardware import AcceleratorInfo, Topology
from workers.protocol.imports import WeightsImport
from workers.protocol.kv_pools import KvPool
from workers.protocol.machine import AcceleratorLoad
from workers.protocol.observed import AgentLiveness, HostTelemetry, ReplicaObserved, UnknownProcess
from workers.protocol.part import Part
from workers.protocol.weights import WeightsReport, WeightsWanted
from workers.protocol.wish import ReplicaSpec

MAJOR = 1
MINOR = 7
"""1: accelerators tell where they sit and what slice they are; Hello has topology and probe notes.
2: a replica has a stall limit; it may be seen stalled, or held up by processes on its memory.
3: Hello has cards that are cut into slices, and links as they are now; unknown processes say whose
they are.
4: a replica's load has its KV tiers, what moved between them, and why prefixes were missed; a
heartbeat has the node's pools of KV blocks, and a replica's limits in them can be changed; a replica may
have an MPS share, and Hello says whether the node can give one; a session's KV can be sent to another
replica.
5: a sent session says what its blocks went by; a node is told which weights to have on its disk, and says
which it has; a replica's model may be one of these; a replica's load says how
long unused what it evicted last was.
6: a node says how the swarm feeds it; a replica says what memory its launch waits for; Hello has the
versions of engines that are no part of this product; weights that a node cannot have say whether they
themselves are at fault; a replica's load says more of what real engines tell, and
a node more of its disks, interfaces and what its tasks wait for; a node takes in
models from places of which there is no manifest yet, and tells what it found.
7: a replica may be a member of one that several nodes run together, and says of which start; one that
stands by may be put to sleep; a node says what its accelerators and RDMA ports carry, how fast its
interfaces are, and how busy its busiest core is."""

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


# ------------------------------------------------------------------------------------------------
# Reports: agent -> control plane
# ------------------------------------------------------------------------------------------------
class Hello(Part, frozen=True, kw_only=True, tag_field="kind", tag="hello"):
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
    engine_versions: dict[str, str] = {}
    """Of the engines that are no part of this product, as their distributions say. Since 1.6."""


class Heartbeat(Part, frozen=True, kw_only=True, tag_field="kind", tag="heartbeat"):
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
    weights: WeightsReport | None = None
    """`None`: this agent keeps none. Since 1.5."""
    accelerator_loads: tuple[AcceleratorLoad, ...] = ()
    """Of whole cards, in the order of their ordinals. Since 1.7."""


class CommandResult(Part, frozen=True, kw_only=True, tag_field="kind", tag="command_result"):
    """What became of a command."""

    node_id: str
    command_id: str
    outcome: str
    """`done`, `refused` (older epoch or generation, past its deadline) or `failed`."""
    reason: str = ""


class LogChunk(Part, frozen=True, kw_only=True, tag_field="kind", tag="log_chunk"):
    """Lines of a replica's log, asked for by `TailLog`, batched at most four times a second."""

    node_id: str
    replica_id: str
    attempt: int
    lines: tuple[str, ...]
    dropped_lines: int = 0
    """Lines left out since the last chunk because the log grew faster than the cap."""
    is_backlog: bool = False
    """The newest lines that there are: some of them may have been sent before. Since 1.7."""


class SessionSent(Part, frozen=True, kw_only=True, tag_field="kind", tag="session_sent"):
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
    carrier: str = ""
    """What the blocks went by: `shared_memory` or `tcp`. Empty: nothing was sent. Since 1.5."""


class ImportFindings(Part, frozen=True, kw_only=True, tag_field="kind", tag="import_findings"):
    """A part of what an import found (`imports.Findings`); sent again while it is wanted. Since 1.6."""

    node_id: str
    import_id: str
    digest: str
    """SHA-256 of all parts together, in hex."""
    index: int
    count: int
    data: bytes
    """`imports.FINDINGS_PART_BYTES` of it; the last part is shorter."""


Report: TypeAlias = Hello | Heartbeat | CommandResult | LogChunk | SessionSent | ImportFindings


# ------------------------------------------------------------------------------------------------
# Commands: control plane -> agent
# ------------------------------------------------------------------------------------------------
class _Command(Part, frozen=True, kw_only=True):
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


class ApplyWeights(_Command, frozen=True, kw_only=True, tag_field="kind", tag="apply_weights"):
    """All weights that the node is to have on its disk. Sent until a heartbeat tells its revision. Since 1.5.

    What is not named is kept while there is room and nobody's; a fetch that it names no more ends.
    """

    revision: int
    """Rises with every change; an older one than already applied is ignored."""
    weights: tuple[WeightsWanted, ...] = ()
    imports: tuple[WeightsImport, ...] = ()
    """Models to take in from elsewhere. Since 1.6."""


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
    way: str = ""
    """`warm_prefill`: have the target compute the context, even where KV could be sent. Since 1.7."""


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
    | ApplyWeights
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
