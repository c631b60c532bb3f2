"""A replica as the control plane wants it: a part of the wish that a node is given."""

from __future__ import annotations

import enum

from workers.protocol.part import Part


class ModelFile(Part, frozen=True, kw_only=True):
    """One file of a model: path relative to the model folder."""

    path: str
    size_bytes: int
    sha256: str


class ModelRef(Part, frozen=True, kw_only=True):
    """Weights and tokenizer, named by digest, and where the node finds them."""

    name: str
    digest: str
    source: str
    """`file:///absolute/folder`: a folder or mount that the node can read."""
    files: tuple[ModelFile, ...] = ()
    manifest_digest: str = ""
    """It starts from the node's own copy of these weights; empty: from `source`, in place. Since 1.5."""


class WantedState(enum.Enum):
    """What the control plane wants of a replica."""

    RUN = "run"
    DRAIN = "drain"
    """Take nothing new, let open requests end, then stop; the deadline is `drain_seconds`."""
    STOP = "stop"


class MpsLimits(Part, frozen=True, kw_only=True):
    """A replica's share of its accelerators under NVIDIA's Multi-Process Service. 0: no such limit.

    Since 1.4.
    """

    thread_percent: int = 0
    memory_bytes: int = 0
    """Of each of its accelerators."""


class GangMember(Part, frozen=True, kw_only=True):
    """This node's part of a replica that several nodes run together. Since 1.7."""

    number: int
    """From 0, the head, which has the rendezvous and answers HTTP."""
    count: int
    """Of all members."""
    epoch: int
    """Which start of the whole this is, from 1. Each member is launched at most once for each."""
    head_address: str = ""
    """`host:port` where the head's HTTP answers; empty until its agent has told it for this epoch, and for
    the head itself, as is `rendezvous`."""
    rendezvous: str = ""
    """`host:port` where the members find each other."""
    hosts: tuple[str, ...] = ()
    """Address of each member's node, by number."""
    adapters: tuple[str, ...] = ()
    """The network adapter next to each of its accelerators; `""` where that is not known."""
    key: str = ""
    """What members prove to one another to belong together by, from the fleet secret and for this epoch alone
    (`digests.gang_key`). Engines that know no such proof do without."""


class ReplicaSpec(Part, frozen=True, kw_only=True):
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
    member: GangMember | None = None
    """`None`: this node runs the whole replica. Since 1.7."""
    asleep: bool = False
    """Once ready and idle its engine gives its accelerators' memory back, and takes it again as soon as this
    is false. Only with an engine and options that can (`engines.sleeping`). Since 1.7."""
