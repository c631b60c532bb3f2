"""Tells nodes which weights to have on their disks, and records what they say that they have.

Level-triggered: each step compares what is claimed with what heartbeats say, so nothing lost on the way
matters for longer than a few seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

from exaserve_ops.controllers.fleet_state import FleetState, NodeView
from exaserve_ops.controllers.ports import AgentLink, ManifestShelf, SwarmBoard
from exaserve_ops.controllers.swarm_record import SwarmRecorder
from exaserve_ops.controllers.swarms import SwarmDirector
from exaserve_ops.inventory.domain.liveness import DEAD
from exaserve_ops.inventory.models import Node
from exaserve_ops.lib import clock
from exaserve_ops.serving.selectors.imports import imports_by_node
from exaserve_ops.serving.selectors.weights import known_revisions, manifest_body, wanted_by_node
from exaserve_ops.weights.domain.held import StoreSight, marks_of
from exaserve_ops.weights.domain.wanted import WantedImport, WantedWeights, digest_of
from exaserve_ops.weights.services import record_sight, record_weights_wish

LOOK_EVERY_SECONDS = 1.0
SAY_AGAIN_SECONDS = 5.0
"""A node that has not taken its wish in is told again so often."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Told:
    """What one node was told, and what of its reports is recorded."""

    sha256: str = ""
    revision: int = 0
    sent_seconds: float = -1e9
    recorded: tuple[object, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Wish:
    """All that one node is to have on its disk."""

    weights: tuple[WantedWeights, ...]
    imports: tuple[WantedImport, ...]


class WeightsKeeper:
    """One look at all nodes a step."""

    def __init__(self, state: FleetState, link: AgentLink, shelf: ManifestShelf, board: SwarmBoard) -> None:
        self._state = state
        self._link = link
        self._shelf = shelf
        self._told: dict[str, _Told] = {}
        self._swarms = SwarmDirector()
        self._swarm_record = SwarmRecorder(board)

    def step(self) -> None:
        """Compare what is wanted with what nodes have taken in, and record what they have."""
        revisions = known_revisions()
        wanted = wanted_by_node(revisions)
        imports = imports_by_node()
        names = {revision.digest: revision.name for revision in revisions.values()}
        self._told = {node_id: self._told.get(node_id, _Told()) for node_id in wanted}
        # Before anybody is told of them.
        manifests = {one.revision.manifest_digest for each in wanted.values() for one in each}
        self._shelf.lay_out(manifests, manifest_body)
        now = time.monotonic()
        views = self._state.nodes()
        wanted = self._swarms.direct(wanted, views)
        for view in views:
            sight = view.heartbeat.weights if view.heartbeat is not None else None
            if sight is None or view.node_id not in wanted:
                continue
            try:
                self._tell(view, sight, Wish(wanted[view.node_id], imports.get(view.node_id, ())), now)
                self._record(view, sight, names)
            except Node.DoesNotExist:
                _log.info("event=node_gone node=%s", view.node_id)
        self._swarm_record.step(self._swarms.looks, views)

    def _tell(self, view: NodeView, sight: StoreSight, wish: Wish, now: float) -> None:
        told = self._told[view.node_id]
        if not (wish.weights or wish.imports or sight.revision or told.revision):
            return  # nothing was ever wanted there
        sha256 = digest_of(wish.weights, wish.imports)
        if told.sha256 != sha256:
            told.revision = record_weights_wish(UUID(view.node_id), content_sha256=sha256)
            told.sha256, told.sent_seconds = sha256, -1e9
        behind = sight.revision != told.revision
        if behind and view.liveness != DEAD and now - told.sent_seconds >= SAY_AGAIN_SECONDS:
            told.sent_seconds = now
            self._link.send_weights(
                view.node_id,
                lease_epoch=view.lease_epoch,
                revision=told.revision,
                weights=wish.weights,
                imports=wish.imports,
            )

    def _record(self, view: NodeView, sight: StoreSight, names: Mapping[str, str]) -> None:
        told = self._told[view.node_id]
        marks = (sight.problem, *sorted(marks_of(sight).items()))
        if told.recorded == marks:
            return
        record_sight(UUID(view.node_id), sight, names=names, now=clock.now())
        told.recorded = marks
