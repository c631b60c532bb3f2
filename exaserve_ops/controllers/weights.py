"""Tells nodes which weights to have on their disks, and records what they say that they have.

Level-triggered: each step compares what is claimed with what heartbeats say, so nothing lost on the way
matters for longer than a few seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from django.db import DataError

from exaserve_ops.controllers.fleet_state import FleetState, NodeView
from exaserve_ops.controllers.ports import AgentLink, ManifestShelf, SwarmBoard
from exaserve_ops.controllers.swarm_record import SwarmRecorder
from exaserve_ops.controllers.swarms import SwarmDirector
from exaserve_ops.inventory.domain.liveness import DEAD
from exaserve_ops.lib import clock
from exaserve_ops.serving.selectors.imports import imports_by_node
from exaserve_ops.serving.selectors.weights import known_revisions, manifest_body, wanted_by_node
from exaserve_ops.weights.domain.held import StoreSight, marks_of, progress_of
from exaserve_ops.weights.domain.wanted import WantedImport, WantedWeights, digest_of
from exaserve_ops.weights.services import record_sights, record_weights_wishes

LOOK_EVERY_SECONDS = 1.0
SAY_AGAIN_SECONDS = 5.0
"""A node that has not taken its wish in is told again so often."""
PROGRESS_EVERY_SECONDS = 10.0
"""How far a fetch is, is in heartbeats; the record follows so often."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Told:
    """What one node was told, and what of its reports is recorded."""

    sha256: str = ""
    revision: int = 0
    sent_seconds: float = -1e9
    recorded: tuple[object, ...] = field(default=())
    progress: tuple[int, ...] = ()
    recorded_seconds: float = -1e9


Heard = tuple[NodeView, StoreSight]
"""A node, and what its last heartbeat says of its disk."""


@dataclass(frozen=True, slots=True)
class Wish:
    """All that one node is to have on its disk."""

    weights: tuple[WantedWeights, ...]
    imports: tuple[WantedImport, ...]

    @property
    def asks(self) -> bool:
        """Whether there is anything in it."""
        return bool(self.weights or self.imports)

    @property
    def sha256(self) -> str:
        """Equal for equal wishes."""
        return digest_of(self.weights, self.imports)


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
        heard = [
            (view, view.heartbeat.weights)
            for view in views
            if view.heartbeat is not None and view.heartbeat.weights is not None and view.node_id in wanted
        ]
        wishes = {key: Wish(weights, imports.get(key, ())) for key, weights in wanted.items()}
        self._tell(heard, wishes, now)
        self._record(heard, names, now)
        self._swarm_record.step(self._swarms.looks, views)

    def _tell(self, heard: Sequence[Heard], wishes: Mapping[str, Wish], now: float) -> None:
        digests = {
            view.node_id: wishes[view.node_id].sha256
            for view, sight in heard
            # Nothing was ever wanted there: nothing is said.
            if wishes[view.node_id].asks or sight.revision or self._told[view.node_id].revision
        }
        self._note_wishes(digests)
        for view, sight in heard:
            told = self._told[view.node_id]
            behind = view.node_id in digests and told.revision > 0 and sight.revision != told.revision
            if behind and view.liveness != DEAD and now - told.sent_seconds >= SAY_AGAIN_SECONDS:
                told.sent_seconds = now
                self._link.send_weights(
                    view.node_id,
                    lease_epoch=view.lease_epoch,
                    revision=told.revision,
                    weights=wishes[view.node_id].weights,
                    imports=wishes[view.node_id].imports,
                )

    def _note_wishes(self, digests: Mapping[str, str]) -> None:
        """Give wishes that changed their revisions. A node that is gone gets none."""
        news = {UUID(key): sha256 for key, sha256 in digests.items() if self._told[key].sha256 != sha256}
        if not news:
            return
        for node_id, revision in record_weights_wishes(news).items():
            told = self._told[str(node_id)]
            told.revision, told.sha256, told.sent_seconds = revision, news[node_id], -1e9

    def _record(self, heard: Sequence[Heard], names: Mapping[str, str], now: float) -> None:
        """Write down what is new: states at once, progress now and then."""
        news: dict[UUID, StoreSight] = {}
        for view, sight in heard:
            told, marks = self._told[view.node_id], (sight.problem, *sorted(marks_of(sight).items()))
            progress = progress_of(sight)
            late = now - told.recorded_seconds >= PROGRESS_EVERY_SECONDS and told.progress != progress
            if told.recorded != marks or late:
                news[UUID(view.node_id)] = sight
                told.recorded, told.progress, told.recorded_seconds = marks, progress, now
        if news:
            self._write(news, names)

    def _write(self, news: Mapping[UUID, StoreSight], names: Mapping[str, str]) -> None:
        try:
            record_sights(news, names=names, now=clock.now())
        except DataError:
            # One that says what no record can hold must not hide the others.
            for node_id, sight in news.items():
                try:
                    record_sights({node_id: sight}, names=names, now=clock.now())
                except DataError as error:
                    _log.warning("event=weights_not_recorded node=%s %s", node_id, error)
