"""Acts on what the blast-radius guard rules: opens, grows and ends incidents, and hears people out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from django.db.models import Count, Q

from exaserve_ops.controllers.fleet_state import NodeView
from exaserve_ops.health.domain.blast_radius import (
    GuardSettings,
    HeldSuspicion,
    Reach,
    Ruling,
    Suspicion,
    WatchedNode,
    is_confirmed_by_gateways,
    is_silence_beginning,
    rule,
)
from exaserve_ops.health.domain.detector import is_late
from exaserve_ops.health.domain.incident import CONFIRMED, DISMISSED, MASS_SILENCE, OPEN
from exaserve_ops.health.models import Incident
from exaserve_ops.health.selectors import undecided_incidents
from exaserve_ops.health.services.incidents import (
    confirm_incident,
    extend_incident,
    mark_applied,
    open_incident,
    resolve_incident,
)
from exaserve_ops.inventory.domain.liveness import ALIVE, DEAD, SUSPECT
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.selectors import rack_of
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.serving.domain.lifecycle import READY
from exaserve_ops.serving.models import Replica

ACTOR = "controller:guard"
RACKS_SECONDS = 15.0
REACH_SECONDS = 1.0
REACH_BEFORE_SECONDS = 10.0
"""What gateways could not reach so long before an incident proves nothing in it."""

_log = logging.getLogger(__name__)


class Guard:
    """Stands between verdicts of death and their effect. For one thread."""

    def __init__(self, settings: GuardSettings | None = None) -> None:
        self._settings = settings or GuardSettings()
        self._held: dict[str, HeldSuspicion] = {}
        self._decided: dict[str, tuple[str, frozenset[str]]] = {}
        """Status and nodes of incidents that somebody decided, until it is carried out."""
        self._accepted: frozenset[str] = frozenset()
        """Dead by somebody's word: no sign any more that the observer is at fault."""
        self._racks: dict[str, str] = {}
        self._racks_at = -1e9
        self._reach_at = -1e9
        self._out_of_reach: list[tuple[float, frozenset[str]]] = []
        self._unclear: dict[str, frozenset[str]] = {}
        """By incident: nodes that gateways could not reach before it, so that it proves nothing."""

    def adopt(self) -> None:
        """Go on where the leader before left off."""
        unclear = frozenset(n for n, seen in reach_of_nodes().items() if seen.unreachable)
        for incident in undecided_incidents().filter(kind=MASS_SILENCE):
            key, nodes = str(incident.pk), frozenset(map(str, incident.node_ids))
            if incident.status == OPEN:
                self._held[key] = HeldSuspicion(key, incident.scope, nodes)
                self._unclear[key] = unclear
            else:
                self._decided[key] = (incident.status, nodes)

    def withhold(self, views: Sequence[NodeView], lost: frozenset[str], now: float) -> frozenset[str]:
        """Return which of the nodes that are due to be declared dead are not to be."""
        self._remember_reach(now)
        if not (lost or self._held or self._decided or any(view.liveness == SUSPECT for view in views)):
            return frozenset()
        self._refresh_racks(views, now)
        self._hear_people()
        self._accepted &= frozenset(view.node_id for view in views if view.liveness == DEAD)
        settled = self._nodes_of(CONFIRMED) | self._nodes_of(DISMISSED) | self._accepted
        nodes = [
            node
            for view in views
            if view.node_id not in settled and (node := self._watched(view, lost, now)) is not None
        ]
        ruling = rule(nodes, self._held.values(), now, self._settings)
        self._carry_out(ruling)
        self._ask_gateways(now)
        silent = frozenset(node.node_id for node in nodes if node.silent)
        self._forget_decided(views, silent)
        waiting = lost - settled if self._begins(views, settled, now) else frozenset()
        return ruling.withheld | self._nodes_of(DISMISSED) | waiting

    # ------------------------------------------------------------------ what is seen
    def _watched(self, view: NodeView, lost: frozenset[str], now: float) -> WatchedNode | None:
        rack = self._racks.get(view.node_id, "")
        if view.liveness in {ALIVE, SUSPECT}:
            silent = view.liveness == SUSPECT or view.node_id in lost
            return WatchedNode(view.node_id, rack, silent)
        died = view.deaths_seconds[-1] if view.deaths_seconds else None
        if view.liveness == DEAD and died is not None and now - died < self._settings.window_seconds:
            return WatchedNode(view.node_id, rack, silent=False, dead=True)
        return None

    def _begins(self, views: Sequence[NodeView], settled: frozenset[str], now: float) -> bool:
        watched = [v for v in views if v.liveness in {ALIVE, SUSPECT} and v.node_id not in settled]
        late = sum(is_late(v.last_report_seconds, v.last_pulse_seconds, now) for v in watched)
        return is_silence_beginning(late, len(watched), self._settings)

    def _refresh_racks(self, views: Sequence[NodeView], now: float) -> None:
        if now - self._racks_at < RACKS_SECONDS and len(views) <= len(self._racks):
            return
        nodes = Node.objects.select_related("failure_domain__parent__parent")
        self._racks = {str(node.pk): rack_of(node) for node in nodes}
        self._racks_at = now

    def _remember_reach(self, now: float) -> None:
        if self._out_of_reach and now - self._out_of_reach[-1][0] < REACH_BEFORE_SECONDS:
            return
        unreachable = frozenset(n for n, seen in reach_of_nodes().items() if seen.unreachable)
        self._out_of_reach = [*self._out_of_reach[-1:], (now, unreachable)]

    def _hear_people(self) -> None:
        if not self._held:
            return
        rows = Incident.objects.filter(pk__in=map(UUID, self._held)).exclude(status=OPEN)
        for pk, status in rows.values_list("pk", "status"):
            held = self._held.pop(str(pk))
            self._unclear.pop(str(pk), None)
            if status in {CONFIRMED, DISMISSED}:
                self._decided[str(pk)] = (status, held.node_ids)

    def _nodes_of(self, status: str) -> frozenset[str]:
        chosen = (nodes for decided, nodes in self._decided.values() if decided == status)
        return frozenset().union(*chosen)

    # ------------------------------------------------------------------ what follows
    def _carry_out(self, ruling: Ruling) -> None:
        for suspicion in ruling.opened:
            self._open(suspicion)
        for held in ruling.standing:
            before = self._held[held.incident_id]
            if held.node_ids != before.node_ids:
                evidence = f"{len(held.node_ids)} nodes fell silent"
                extend_incident(UUID(held.incident_id), node_ids=_uuids(held.node_ids), evidence=evidence)
            self._held[held.incident_id] = held
        for ended in ruling.ended:
            self._end(ended.held, ended.resolution)

    def _open(self, suspicion: Suspicion) -> None:
        incident = open_incident(
            MASS_SILENCE,
            scope=suspicion.scope,
            node_ids=_uuids(suspicion.node_ids),
            evidence=suspicion.evidence,
            actor=ACTOR,
            now=clock.now(),
        )
        _log.warning("event=incident_opened scope=%r evidence=%r", suspicion.scope, suspicion.evidence)
        key = str(incident.pk)
        self._held[key] = HeldSuspicion(key, suspicion.scope, suspicion.node_ids)
        self._unclear[key] = self._out_of_reach[0][1] if self._out_of_reach else frozenset()

    def _end(self, held: HeldSuspicion, resolution: str) -> None:
        try:
            resolve_incident(UUID(held.incident_id), resolution=resolution, actor=ACTOR, now=clock.now())
        except ConflictError:
            return  # somebody decided it this moment: heard in the next round
        self._held.pop(held.incident_id)
        self._unclear.pop(held.incident_id, None)

    def _ask_gateways(self, now: float) -> None:
        if not self._held or now - self._reach_at < REACH_SECONDS:
            return
        self._reach_at = now
        reach = reach_of_nodes()
        for key, held in self._held.items():
            unclear = self._unclear.get(key, frozenset())
            known = {n: replace(seen, ready=0) if n in unclear else seen for n, seen in reach.items()}
            reason = is_confirmed_by_gateways(held.node_ids, known)
            if not reason:
                continue
            try:
                confirm_incident(UUID(key), reason=reason, actor=ACTOR, now=clock.now())
            except ConflictError:
                continue  # a person was faster

    def _forget_decided(self, views: Sequence[NodeView], silent: frozenset[str]) -> None:
        """Drop nodes that report again, and those whose death is written down."""
        dead = {view.node_id for view in views if view.liveness == DEAD}
        quiet = silent | {v.node_id for v in views if v.liveness == SUSPECT}
        for key, (status, nodes) in list(self._decided.items()):
            if status == CONFIRMED:
                self._accepted |= nodes & dead
            left = nodes & quiet - dead
            if left:
                self._decided[key] = (status, left)
            else:
                del self._decided[key]
                mark_applied(UUID(key), now=clock.now())


def reach_of_nodes() -> Mapping[str, Reach]:
    """What gateways say of each node's ready replicas. Simulated ones cannot be connected to."""
    rows = (
        Replica.objects.filter(status=READY, node__simulated=False)
        .order_by()
        .values("node")
        .annotate(ready=Count("pk"), unreachable=Count("pk", filter=~Q(unroutable_reason="")))
    )
    return {str(row["node"]): Reach(row["ready"], row["unreachable"]) for row in rows}


def _uuids(node_ids: frozenset[str]) -> list[UUID]:
    return [UUID(node_id) for node_id in node_ids]
