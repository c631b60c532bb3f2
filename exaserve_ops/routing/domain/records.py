"""What a gateway knows of the fleet: whole records, pushed through Redis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RouteRecord:
    """A replica that may be routed to. Compared whole: a moved port is a new record."""

    replica_id: str
    node_id: str
    node_name: str
    key_epoch: int
    """With the fleet secret, node id and attempt, derives the engine's bearer token."""
    model: str
    """Name that clients send as `model`."""
    deployment: str
    host: str
    port: int
    attempt: int
    generation: int
    accepts_new: bool = True
    """False while draining: what is open there may end, and only its own sessions go there, if any do."""
    block_tokens: int = 16
    reached: bool = True
    """Whether some gateway has connected to it, or none was there to: gateways start with that."""
    node_suspect: bool = False
    """Its node misses signs of life: nobody new goes there while others serve."""
    is_left: bool = False
    """Its sessions are on their way elsewhere: nobody new goes there while another one has room."""
    keeps_sessions: bool = False
    """It drains, and its sessions have not left yet: until they do, their turns are served there."""
    sleeps: bool = False
    """Its engine is asleep or wakes: it answers nobody, though its port is open."""

    @property
    def serves_sessions(self) -> bool:
        """Whether the turns of its own sessions go there."""
        return self.accepts_new or self.keeps_sessions


class ReplicaFacts(NamedTuple):
    """Load of one replica. `None` is unknown, which is neutral, not zero. A tuple: small on the wire."""

    replica_id: str
    requests_running: int | None = None
    requests_waiting: int | None = None
    kv_used_ratio: float | None = None
    ttft_p95_seconds: float | None = None
    weight: float = 1.0
    """Its share of new work against a well replica's; 0 where it is to get none while others can."""
    kv_evicted_idle_seconds: float | None = None
    """How long ago the KV block evicted last had been used: what was used later is still there."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Load of one node's replicas, and when the control plane received it (Unix seconds)."""

    node_id: str
    received_at_seconds: float
    replicas: tuple[ReplicaFacts, ...] = ()


BATCH = "batch"
"""Traffic that waits behind everybody else's."""
LONG_CONTEXT = "long-context"
"""Traffic whose prompts take long to compute: few of them at a replica at once. By size, or said so."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key for inference, named by the SHA-256 of its text in the table's field."""

    key_id: str
    name: str
    max_concurrent_requests: int | None = None
    """Over all gateways together, as is the next one; `None` is no bound."""
    tokens_per_minute: int | None = None
    """Prompt and completion together."""
    traffic_class: str = "interactive"


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """How one gateway process does, over its last minutes and now."""

    gateway: str
    """Host and port, and the process where there are several."""
    returning_turns: int
    """Turns of sessions that had an owner before."""
    sticky_turns: int
    """Of these, turns that went to that owner."""
    window_seconds: float
    """Both were counted over so long."""
    open_requests: int
    waiting_requests: int
    route_table_age_seconds: float | None
    is_route_table_stale: bool
    session_table_failures: int
    """Turns since its start that were routed without the session table."""

    @property
    def sticky_ratio(self) -> float | None:
        """Share of returning turns that reached their session's replica; `None` without any."""
        return self.sticky_turns / self.returning_turns if self.returning_turns else None


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One finished request, for accounting and the session's history. Times in Unix seconds."""

    request_id: str
    session_id: str
    """Empty for an anonymous request."""
    model: str
    replica_id: str
    node_id: str
    key_id: str
    path: str
    started_at_seconds: float
    duration_seconds: float
    ttft_seconds: float | None
    outcome: str
    """`ok`, `client_error`, `engine_error`, `client_gone`, `interrupted` or `unavailable`."""
    status: int
    why: str
    """Why this replica: `sticky`, `new`, `repinned`, `prefix`, `hash`, `retry`, `continued`."""
    attempts: int = 1
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    continued_from: tuple[str, ...] = ()
    """Replicas that broke off in the middle of the answer, in order; this one gave the rest."""
    streamed_events: int = 0
    """Events that the answer came as, about one a token; 0: it came whole, all its tokens at once."""
