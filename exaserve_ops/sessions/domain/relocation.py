"""What a plan of moves of conversations is made from, what it says, and what one move costs. Pure.

A replica's *pressure* is the tokens of the conversations that came back to it lately, over the tokens
that its KV memory holds. Above 1 they evict one another, and each turn computes its whole context
again; what an engine reports as used KV does not show that, since an idle conversation's blocks count
as free. Conversations leave a replica because it leaves (drain, rollout), because somebody asked, or
because its pressure is too far above others'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exaserve_ops.sessions.domain.sending import UNMEASURED, Sending

ASKED = "asked"
"""A person wants it moved."""
LEAVING = "leaving"
"""Its replica leaves."""
BALANCE = "balance"
"""Its replica is too full."""
TRIGGERS = (ASKED, LEAVING, BALANCE)

TRANSFER = "transfer"
"""The KV goes along."""
PREFILL = "prefill"
"""The target computes the context between the turns, of text that the source gives it."""
RECOMPUTE = "recompute"
"""Only the affinity moves; the target computes the context at the next turn."""
MOST_PREFILL_SECONDS = 20.0
"""A context that takes longer would not be there within the time of one move."""


@dataclass(frozen=True, slots=True)
class ReplicaRoom:
    """What a replica reports of its room for conversations. `None`: it does not say."""

    kv_capacity_tokens: int | None = None
    kv_used_ratio: float | None = None
    requests_waiting: int | None = None


def room_of(
    total_blocks: int | None, block_tokens: int | None, used_ratio: float | None, waiting: int | None
) -> ReplicaRoom:
    """Read it out of a replica's load."""
    capacity = (total_blocks or 0) * (block_tokens or 0)
    return ReplicaRoom(capacity or None, used_ratio, waiting)


def rooms_of(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, ReplicaRoom]:
    """Read it out of the telemetry of nodes, as it is kept for pages; by replica id."""
    loads = {
        replica_id: told.get("load") or {}
        for report in reports.values()
        for replica_id, told in report.get("replicas", {}).items()
    }
    return {
        replica_id: room_of(
            load.get("kv_total_blocks"),
            load.get("kv_block_tokens"),
            load.get("kv_used_ratio"),
            load.get("requests_waiting"),
        )
        for replica_id, load in loads.items()
    }


@dataclass(frozen=True, slots=True)
class Holder:
    """A replica, as a place for conversations."""

    replica_id: str
    node_id: str
    rack: str
    deployment: str
    kv_layout: str
    """KV moves only between equal ones: same weights, element type and block shape."""
    kv_capacity_tokens: int | None
    active_tokens: int = 0
    """Of all its conversations that had a turn lately."""
    kv_used_ratio: float | None = None
    """Of its KV memory, by requests that run; as its engine reports, as is the next one."""
    requests_waiting: int | None = None
    accepts: bool = True
    """Whether it may be given conversations: ready, not draining, reached."""
    leaves: str = ""
    """Why all of its conversations must go, such as `node n3 drains`; empty where it stays."""
    leave_to: frozenset[str] = frozenset()
    """Replicas that they may go to; empty: any of its deployment."""
    release: str = ""
    """What it runs: a conversation that a rollout has moved does not go back to another one for balance."""
    knows_text: bool = False
    """Whether its engine can give its conversations' text to another one, and compute what it is given."""


@dataclass(frozen=True, slots=True)
class HeldSession:
    """A conversation and the replica that its next turn would go to."""

    session_id: str
    replica_id: str
    owner_epoch: int
    context_tokens: int
    idle_seconds: float
    """Since its last turn ended."""
    in_turn: bool = False
    turns: int = 2
    moved_seconds_ago: float | None = None
    """Since it was moved, or that was tried. `None`: not since anybody remembers."""
    asked_target: str = ""
    """Replica that an operator wants it on."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What moving and computing cost for one deployment, as measured; `None` is not measured yet."""

    kv_bytes_per_token: int
    prefill_tokens_per_second: float | None = None
    same_node: Sending = UNMEASURED
    across: Sending = UNMEASURED
    fixed_seconds: float = 0.02
    """Of a move beside sending: preparing the target, and the swap."""

    def sending(self, *, same_node: bool) -> Sending:
        """What sending costs within a node, or between two."""
        return self.same_node if same_node else self.across


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may move at once."""

    moves_per_node: int = 2
    moves_per_fleet: int = 32
    bytes_available: int = 1 << 30
    """What the limit of bytes per second has left now."""
    bytes_full: int = 1 << 30
    """What it has after a rest: one move that is larger than this may then go, alone."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When the pressures of a deployment's replicas are levelled, and with what."""

    start_pressure: float = 0.9
    """Of the fullest; one that queues, with so much of its KV in use, counts as that full."""
    start_gap_ratio: float = 0.3
    """Fullest less emptiest replica, over the fullest where that is above 1."""
    stop_gap_ratio: float = 0.1
    least_turns: int = 2
    """A conversation that came back once is likely to come back again; one that never did is left."""
    settle_seconds: float = 1.0
    """After a turn: a client that sends the next one at once is not raced."""
    rest_seconds: float = 60.0
    """After a move, or the try of one, before balance may move the same conversation again."""
    return_seconds: float = 300.0
    """After a move from A to B, before balance moves anything from B to A."""


def is_full(tokens: int, room: ReplicaRoom, limits: Thresholds) -> bool:
    """Whether so many tokens of conversations are too many, or its engine says that it is full and queues."""
    queues = bool(room.requests_waiting) and (room.kv_used_ratio or 0.0) >= limits.start_pressure
    return queues or tokens >= limits.start_pressure * (room.kv_capacity_tokens or math.inf)


ACTIVE_SECONDS = 600.0
"""A conversation quiet for longer counts for nothing, and balance leaves it where it is."""


@dataclass(frozen=True, slots=True)
class Underway:
    """A move that has not ended."""

    session_id: str
    source_id: str
    target_id: str
    active_tokens: int = 0
    """What its conversation counts for; still counted at the source."""


@dataclass(frozen=True, slots=True)
class Levelled:
    """Something that balance moved of late, or is moving."""

    source_id: str
    target_id: str
    seconds_ago: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a move costs, and which way is cheaper."""

    kv_bytes: int
    transfer_seconds: float | None
    recompute_seconds: float | None
    way: str

    def sentence(self) -> str:
        """Say the comparison."""
        if self.way == PREFILL:
            takes = "" if self.recompute_seconds is None else f", about {self.recompute_seconds:.3f} s"
            return f"the target computes it before the next turn{takes}"
        if self.transfer_seconds is None or self.recompute_seconds is None:
            return f"{self.way}: not both ways were measured yet"
        sign = "<" if self.transfer_seconds < self.recompute_seconds else ">="
        return f"transfer {self.transfer_seconds:.3f} s {sign} recompute {self.recompute_seconds:.3f} s"


@dataclass(frozen=True, slots=True)
class Relocation:
    """One conversation to move."""

    session_id: str
    source_id: str
    target_id: str
    owner_epoch: int
    context_tokens: int
    estimate: Estimate
    why: str
    trigger: str = ASKED


@dataclass(frozen=True, slots=True)
class Stay:
    """A conversation that should move and does not, and why."""

    session_id: str
    replica_id: str
    why: str


@dataclass(frozen=True, slots=True)
class RelocationPlan:
    """Moves to begin now, those that wait with their reasons, and which deployments are being levelled."""

    moves: tuple[Relocation, ...] = ()
    stays: tuple[Stay, ...] = ()
    balancing: frozenset[str] = frozenset()
    """Deployments, to be handed to the next plan: levelling stops later than it starts."""
    pressures: tuple[tuple[str, float], ...] = ()
    """Replica id and pressure before the moves, fullest first; those of unknown capacity are left out."""
    notes: tuple[tuple[str, str], ...] = ()
    """Deployment and a sentence, for each that is being levelled."""


@dataclass(frozen=True, slots=True)
class FleetSessions:
    """All that a plan is made from."""

    holders: tuple[Holder, ...]
    sessions: tuple[HeldSession, ...]
    """Those that may have to move; how much each replica holds in all, its holder says."""
    rates: tuple[tuple[str, Rates], ...]
    """By deployment."""
    underway: tuple[Underway, ...] = ()
    thresholds: tuple[tuple[str, Thresholds], ...] = ()
    """By deployment; those without are not levelled."""
    balancing: frozenset[str] = frozenset()
    """Deployments that were being levelled when the last plan was made."""
    levelled: tuple[Levelled, ...] = ()


def break_even_tokens(rates: Rates, *, same_node: bool) -> float | None:
    """From how long a context on sending its KV is faster than computing it again; infinite: never.

    `None` where one of the two was not measured yet.
    """
    sending = rates.sending(same_node=same_node)
    if not sending.bytes_per_second or not rates.prefill_tokens_per_second:
        return None
    gained = 1 / rates.prefill_tokens_per_second - rates.kv_bytes_per_token / sending.bytes_per_second
    return (rates.fixed_seconds + sending.talk_seconds) / gained if gained > 0 else math.inf


def estimate_move(
    tokens: int, rates: Rates, *, same_node: bool, same_layout: bool, knows_text: bool = False
) -> Estimate:
    """Compare sending the KV of so many tokens with computing it again at the target.

    `knows_text` says that the source can have the target compute it between the turns.
    """
    kv_bytes = tokens * rates.kv_bytes_per_token
    sent = rates.sending(same_node=same_node).seconds(kv_bytes)
    transfer = rates.fixed_seconds + sent if sent is not None else None
    recompute = tokens / rates.prefill_tokens_per_second if rates.prefill_tokens_per_second else None
    way = TRANSFER
    # Of a context of no known length neither figure says anything: then its KV goes along.
    is_slower = tokens > 0 and transfer is not None and recompute is not None and transfer >= recompute
    if not same_layout or is_slower:
        is_quick = recompute is None or recompute <= MOST_PREFILL_SECONDS
        way = PREFILL if knows_text and is_quick else RECOMPUTE
    return Estimate(kv_bytes if way == TRANSFER else 0, transfer, recompute, way)
