"""The fleet as one gateway sees it: who may be routed to, and how much is open where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from exaserve_ops.adapters.session_table import owner_digest
from exaserve_ops.gateway.outbox import Outbox
from exaserve_ops.gateway.settings import GatewaySettings
from exaserve_ops.gateway.upstream import UpstreamPool, authority
from exaserve_ops.routing.domain import markdown, policy
from exaserve_ops.routing.domain.records import NodeFacts, ReplicaFacts, RouteRecord
from exaserve_ops.serving.domain.trials import is_private
from workers.protocol import digests

FACTS_LIFETIME_SECONDS = 10.0
"""Load that has not been refreshed for so long is unknown."""
STICKY = "sticky"
REPINNED = "repinned"
OWNER_REASONS = (STICKY, REPINNED, policy.DRAWN)
_HOUSEKEEPING_SECONDS = 1.0
_UNKNOWN: tuple[None, float] = (None, 0.0)
MODEL_MEMORY_SECONDS = 600.0
"""How long a model without replicas is remembered, so that requests wait instead of getting 404."""


class ReplicaSlot:
    """One replica at one address. A replica that moves gets a new slot; old streams keep theirs."""

    __slots__ = (
        "_facts",
        "answer_lines",
        "capacity",
        "evicted_until_seconds",
        "group",
        "in_flight",
        "long_prompts",
        "mark",
        "name",
        "owner",
        "pending_tokens",
        "pool",
        "reach",
        "record",
        "request_prefix",
        "routes",
    )

    def __init__(self, record: RouteRecord, pool: UpstreamPool, token: str) -> None:
        self.record = record
        self.name = record.replica_id
        self.owner = owner_digest(record.replica_id)
        """What names it in the session table."""
        self.pool = pool
        self.in_flight = 0
        self.long_prompts = 0
        """Long prompts among these; see `Router`."""
        self.pending_tokens = 0.0
        """About what this gateway's requests have to compute here before their first tokens."""
        self.reach: bool | None = None
        """Whether this gateway could connect to it; `None` before it has tried."""
        self.capacity = 1.0
        """Its share of new work against a well replica's, as the control plane judged it of late."""
        self.evicted_until_seconds = -math.inf
        """What it was sent before this time of our clock has left its KV cache."""
        self.mark = markdown.CLEAR
        self.group = NodeGroup(record.node_id)
        self.routes = {why: policy.Choice(self, why) for why in OWNER_REASONS}
        """The choices of a session's own replica, made once."""
        self._facts: ReplicaFacts | None = None
        host = authority(record.host, record.port)
        self.request_prefix = b" HTTP/1.1\r\nhost: %b\r\nauthorization: Bearer %b\r\n" % (
            host,
            token.encode(),
        )
        self.answer_lines = b"x-exaops-replica: %b\r\nx-exaops-node: %b\r\n" % (
            record.replica_id.encode(),
            record.node_id.encode(),
        )

    @property
    def weight(self) -> float:
        """Its share of new work against a well replica's."""
        return self.capacity

    @property
    def is_open(self) -> bool:
        """Whether requests may go there at all: it is awake, and this gateway or another has reached it."""
        return not self.record.sleeps and (self.reach is True or self.record.reached)

    @property
    def failed_at_seconds(self) -> float:
        """Monotonic time of the last failure, 0 if there was none."""
        return self.mark.failed_at_seconds

    @property
    def reported_requests(self) -> int | None:
        """Running and waiting as the engine reported, `None` if unknown or stale."""
        facts = self._facts
        if facts is None or facts.requests_running is None or facts.requests_waiting is None:
            return None
        return facts.requests_running + facts.requests_waiting

    @property
    def kv_used_ratio(self) -> float | None:
        """Share of KV blocks in use, `None` if unknown or stale."""
        return self._facts.kv_used_ratio if self._facts else None

    def acquire(self) -> None:
        """One more request is open here."""
        self.in_flight += 1
        self.group.in_flight += 1

    def release(self) -> None:
        """One request less is open here."""
        self.in_flight -= 1
        self.group.in_flight -= 1

    def note_facts(self, facts: ReplicaFacts | None, as_of_seconds: float = 0.0) -> None:
        """Take the newest load, as of a time of our clock, or `None` for unknown."""
        self._facts = facts
        self.capacity = 1.0 if facts is None else facts.weight
        if facts is not None and facts.kv_evicted_idle_seconds is not None:
            until = as_of_seconds - facts.kv_evicted_idle_seconds
            self.evicted_until_seconds = max(self.evicted_until_seconds, until)


class NodeGroup:
    """The replicas of one model on one node, with their sums: the node's summary."""

    __slots__ = (
        "capacity",
        "in_flight",
        "is_suspect",
        "kv_used_ratio",
        "name",
        "replicas",
        "reported_requests",
    )

    def __init__(self, node_id: str, *, is_suspect: bool = False) -> None:
        self.name = node_id
        self.capacity = 0.0
        """Sum of its replicas' shares."""
        self.is_suspect = is_suspect
        self.replicas: list[ReplicaSlot] = []
        self.in_flight = 0
        self.reported_requests: int | None = None
        self.kv_used_ratio: float | None = None

    def adopt(self, slot: ReplicaSlot) -> None:
        """Count a replica, and what is open on it, here."""
        self.replicas.append(slot)
        self.in_flight += slot.in_flight
        self.capacity += slot.capacity
        slot.group = self

    def sum_up(self) -> None:
        """Compute the summary; one unknown makes a sum unknown."""
        self.capacity = sum(slot.capacity for slot in self.replicas)
        queues = [slot.reported_requests for slot in self.replicas]
        known = [queue for queue in queues if queue is not None]
        self.reported_requests = sum(known) if known and len(known) == len(queues) else None
        ratios = [slot.kv_used_ratio for slot in self.replicas if slot.kv_used_ratio is not None]
        self.kv_used_ratio = sum(ratios) / len(ratios) if ratios else None


class Fleet:
    """All replicas, grouped by model and node, kept over each change of the route table."""

    def __init__(self, settings: GatewaySettings, outbox: Outbox) -> None:
        self._settings = settings
        self._outbox = outbox
        self._slots: dict[str, ReplicaSlot] = {}
        self._by_owner: dict[bytes, ReplicaSlot] = {}
        self._groups: dict[str, list[NodeGroup]] = {}
        self._left_groups: dict[str, list[NodeGroup]] = {}
        """Of replicas that sessions are leaving."""
        self._facts: Mapping[str, NodeFacts] = {}
        self._facts_changed_seconds: dict[str, float] = {}
        self._spread_without: frozenset[str] = frozenset()
        """Nodes whose load counted as unknown when load was last spread to replicas."""
        self._swept_at = -1e9
        self._declared_models: frozenset[str] = frozenset()
        self._coming_models: frozenset[str] = frozenset()
        self._model_seen_seconds: dict[str, float] = {}
        self.is_loaded = False

    def find(self, replica_id: str) -> ReplicaSlot | None:
        """Return a replica that is in the table."""
        return self._slots.get(replica_id)

    def find_owner(self, owner: bytes) -> ReplicaSlot | None:
        """Return the replica that a session's entry names, if it is in the table."""
        return self._by_owner.get(owner)

    def groups(self, model: str) -> list[NodeGroup]:
        """Nodes with replicas that new requests for a model go to; empty if there are none."""
        return self._groups.get(model, [])

    def left_groups(self, model: str) -> list[NodeGroup]:
        """Nodes with replicas that sessions are leaving: for what has no place at the others."""
        return self._left_groups.get(model, [])

    def models(self) -> list[str]:
        """Models to list: served now, or by a deployment that has no replica at present."""
        return sorted(self._groups.keys() | self._left_groups.keys() | self._declared_models)

    def may_exist(self, model: str) -> bool:
        """Whether a request for this model is worth waiting: false only for what nobody declared."""
        return (
            not self.is_loaded
            or (not self._slots and not self._declared_models)
            or model in self._groups
            or model in self._left_groups
            or model in self._declared_models
            or model in self._model_seen_seconds
        )

    def slots(self) -> list[ReplicaSlot]:
        """All replicas in the table."""
        return list(self._slots.values())

    def replace(self, records: Mapping[str, RouteRecord], now: float) -> None:
        """Take a new table in. A replica that moved or was started again is a new one."""
        kept: dict[str, ReplicaSlot] = {}
        for replica_id, record in records.items():
            slot = self._slots.get(replica_id)
            if slot is not None and _identity(slot.record) == _identity(record):
                slot.record = record
            else:
                was_known = slot is not None
                slot = self._make_slot(record)
                if was_known:
                    slot.evicted_until_seconds = now  # it was started again: its memory is empty
            kept[replica_id] = slot
        for replica_id, slot in self._slots.items():
            if kept.get(replica_id) is not slot:
                slot.pool.retire()
        self._slots = kept
        self._by_owner = {slot.owner: slot for slot in kept.values()}
        self.is_loaded = True
        self._regroup(now)

    def declare_models(self, names: frozenset[str], coming: frozenset[str] = frozenset()) -> None:
        """Take in which models deployments serve, and for which of them a replica is on its way."""
        self._declared_models = names
        self._coming_models = coming

    def is_coming(self, model: str) -> bool:
        """Whether a replica of this model is on its way."""
        return model in self._coming_models

    def note_facts(self, facts: Mapping[str, NodeFacts], now: float) -> None:
        """Take in new load; its age counts from when it was seen to change, not by a sent clock."""
        for node_id, record in facts.items():
            if self._facts.get(node_id) != record:
                self._facts_changed_seconds[node_id] = now
        for node_id in self._facts_changed_seconds.keys() - facts.keys():
            del self._facts_changed_seconds[node_id]
        self._facts = facts
        self._spread_facts(now)

    def sweep(self, now: float) -> None:
        """Forget what is too old: load, idle connections, models."""
        if self._stale_nodes(now) != self._spread_without:
            self._spread_facts(now)
        if now - self._swept_at < _HOUSEKEEPING_SECONDS:
            return
        self._swept_at = now
        for slot in self._slots.values():
            slot.pool.close_idle(now)
        for model, seen_seconds in list(self._model_seen_seconds.items()):
            if now - seen_seconds > MODEL_MEMORY_SECONDS:
                del self._model_seen_seconds[model]
        for model in self._groups.keys() | self._left_groups.keys():
            self._model_seen_seconds[model] = now

    def close(self) -> None:
        """Close all idle connections."""
        for slot in self._slots.values():
            slot.pool.retire()

    def _make_slot(self, record: RouteRecord) -> ReplicaSlot:
        settings = self._settings
        key = digests.node_key(settings.fleet_secret, record.node_id, record.key_epoch)
        pool = UpstreamPool(
            record.host,
            record.port,
            outbox=self._outbox,
            connect_seconds=settings.connect_seconds,
            idle_seconds=settings.upstream_idle_seconds,
            idle_limit=settings.upstream_idle_connections,
        )
        token = digests.engine_api_key(key, record.replica_id, record.attempt)
        return ReplicaSlot(record, pool, token)

    def _regroup(self, now: float) -> None:
        # Nobody new goes to those that do not accept; their open streams need no group. Trials are nobody's.
        routed = (slot for slot in self._slots.values() if not is_private(slot.record.model))
        accepting = [slot for slot in routed if slot.record.accepts_new]
        self._groups = _grouped(slot for slot in accepting if not slot.record.is_left)
        self._left_groups = _grouped(slot for slot in accepting if slot.record.is_left)
        for model in self._groups.keys() | self._left_groups.keys():
            self._model_seen_seconds[model] = now
        self._groups = {model: _less_suspects(known) for model, known in self._groups.items()}
        self._spread_facts(now)

    def _spread_facts(self, now: float) -> None:
        current: dict[str, tuple[ReplicaFacts | None, float]] = {}
        self._spread_without = self._stale_nodes(now)
        for node_id, facts in self._facts.items():
            if node_id not in self._spread_without:
                as_of_seconds = self._facts_changed_seconds[node_id]
                current.update((replica.replica_id, (replica, as_of_seconds)) for replica in facts.replicas)
        for slot in self._slots.values():
            slot.note_facts(*current.get(slot.name, _UNKNOWN))
        for groups in (*self._groups.values(), *self._left_groups.values()):
            for group in groups:
                group.sum_up()

    def _stale_nodes(self, now: float) -> frozenset[str]:
        """Nodes whose load is too old to be believed."""
        oldest = now - FACTS_LIFETIME_SECONDS
        return frozenset(node_id for node_id, at in self._facts_changed_seconds.items() if at < oldest)


def _grouped(slots: Iterable[ReplicaSlot]) -> dict[str, list[NodeGroup]]:
    """Replicas by model, and by node within."""
    groups: dict[tuple[str, str], NodeGroup] = {}
    for slot in slots:
        place = (slot.record.model, slot.record.node_id)
        if place not in groups:
            groups[place] = NodeGroup(slot.record.node_id, is_suspect=slot.record.node_suspect)
        groups[place].adopt(slot)
    by_model: dict[str, list[NodeGroup]] = {}
    for (model, _), group in groups.items():
        by_model.setdefault(model, []).append(group)
    return by_model


def _less_suspects(groups: list[NodeGroup]) -> list[NodeGroup]:
    """Nodes that new requests go to: none that is suspect, unless most are and suspicion says nothing."""
    sound = [group for group in groups if not group.is_suspect]
    return sound if 2 * len(sound) >= len(groups) else groups


def _identity(record: RouteRecord) -> tuple[Any, ...]:
    """What makes a replica another one to a gateway: where it is, and which token it wants."""
    return (
        record.node_id,
        record.key_epoch,
        record.model,
        record.host,
        record.port,
        record.attempt,
    )
