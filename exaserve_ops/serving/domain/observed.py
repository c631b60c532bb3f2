"""What an agent saw, in the control plane's own terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from exaserve_ops.serving.domain.accelerator_wish import MpsShare


@dataclass(frozen=True, slots=True)
class ObservedExit:
    """How an engine's main process ended."""

    attempt: int
    code: int | None
    signal: int | None
    after_seconds: float
    log_tail: tuple[str, ...]
    why: str = ""
    """Why its agent ended it, or how it ended by itself."""

    @property
    def is_known(self) -> bool:
        """Whether somebody was there to see it; else `after_seconds` means nothing."""
        return self.code is not None or self.signal is not None

    def sentence(self) -> str:
        """How it ended, for a reason: `killed by signal 9 after 12.3 s`."""
        if self.signal:
            return f"killed by signal {self.signal} after {self.after_seconds:.1f} s"
        if self.code is not None:
            return f"exited with code {self.code} after {self.after_seconds:.1f} s"
        return "ended; how is not known"

    def told(self) -> str:
        """How it ended, and why its agent ended it; what ended by itself has said how already."""
        ended_by_agent = self.why.startswith(("stalled", "dead", "not ready", "did not wake"))
        return f"{self.sentence()}: {self.why}" if ended_by_agent else self.sentence()


@dataclass(frozen=True, slots=True)
class MemoryUser:
    """Who is in the way of a launch that waits for memory."""

    kind: str
    """`stranger`, `leaving`, `running` or `unnamed`."""
    pid: int = 0
    replica_id: str = ""
    command: str = ""
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryShortage:
    """What a launch needs of the memory that it was promised, and what was seen to be free."""

    place: str
    """The accelerator, or `host`."""
    needed_bytes: int
    free_bytes: int
    total_bytes: int
    at_most_seconds: float | None = None
    """It is launched all the same after so long; `None`: strangers keep it out."""
    holders: tuple[MemoryUser, ...] = ()


class ReplicaLoad(Protocol):
    """Load over a sliding window. `None`: the engine did not say. Nobody changes one.

    What an agent's message is decoded into is one already: thousands a second are read and none is copied.
    """

    age_seconds: float
    requests_running: int | None
    requests_waiting: int | None
    kv_used_ratio: float | None
    kv_total_blocks: int | None
    kv_block_tokens: int | None
    requests_per_second: float | None
    prompt_tokens_per_second: float | None
    generation_tokens_per_second: float | None
    prefix_hit_ratio: float | None
    ttft_p50_seconds: float | None
    ttft_p95_seconds: float | None
    ttft_p99_seconds: float | None
    itl_p50_seconds: float | None
    itl_p95_seconds: float | None
    prefix_query_tokens_total: float | None
    prefix_hit_tokens_total: float | None
    notes: tuple[str, ...]
    kv_thrash_reason: str
    kv_evicted_idle_seconds: float | None


class ObservedReplica(NamedTuple):
    """One replica as its agent sees it. `state` is one of the agent's observed states.

    A tuple and no dataclass: made for every replica once a second, it costs a third.
    """

    replica_id: str
    generation: int
    state: str
    attempt: int = 0
    restarts: int = 0
    reason: str = ""
    pid: int | None = None
    address: str = ""
    ports: tuple[int, ...] = ()
    uptime_seconds: float = 0.0
    start_took_seconds: float | None = None
    retry_in_seconds: float | None = None
    active_requests: int | None = None
    last_exit: ObservedExit | None = None
    load: ReplicaLoad | None = None
    stalled: bool = False
    """Requests ran and no token came; its agent restarts it."""
    held_by_pids: tuple[int, ...] = ()
    """Processes that hold the memory that it waits for."""
    memory_wait: MemoryShortage | None = None
    """What its launch waits for, where that is memory."""
    sleep_state: str = ""
    """One of `sleep.STATES`; empty: awake."""
    sleep_note: str = ""
    """Why it is awake though it is to sleep."""
    woke_in_seconds: float | None = None
    member_number: int = 0
    epoch: int = 0
    """Which start of a replica over several nodes this is about; 0 for others."""
    rendezvous: str = ""
    """Of such a replica's head: where its members find each other."""

    @property
    def event(self) -> str:
        """The lifecycle event that this sighting is."""
        return f"seen_{self.state}"


@dataclass(frozen=True, slots=True)
class WantedMember:
    """A node's part of a replica over several nodes."""

    number: int
    count: int
    epoch: int
    head_address: str = ""
    """Empty until the head's agent has told it for this epoch, and for the head itself, as is the next."""
    rendezvous: str = ""
    hosts: tuple[str, ...] = ()
    """Addresses of the members' nodes, by number."""
    adapters: tuple[str, ...] = ()
    """The network adapter next to each of its accelerators; empty where none is known."""


@dataclass(frozen=True, slots=True)
class WantedReplica:
    """One replica as a node should run it; what the wish of a node is made of."""

    replica_id: str
    deployment: str
    generation: int
    wanted: str
    model_name: str
    model_digest: str
    model_source: str
    model_files: tuple[tuple[str, int, str], ...]
    engine: str
    engine_options: dict[str, str | int | float | bool] = field(default_factory=dict)
    accelerator_uuids: tuple[str, ...] = ()
    memory_bytes: int = 0
    drain_seconds: float = 60.0
    start_seconds: float = 300.0
    stall_seconds: float = 60.0
    """Requests run and no token comes for so long: restart it. 0: never."""
    mps: MpsShare | None = None
    """Its share of its accelerators; `None`: it has them as they are."""
    manifest_digest: str = ""
    """It starts from the node's own copy of these weights; empty: from the source, in place."""
    asleep: bool = False
    """It stands by and is to give its accelerators' memory back meanwhile."""
    member: WantedMember | None = None
    """`None`: it runs on one node."""
