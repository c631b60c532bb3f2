"""Watches imports of models: records how they go, and registers a model when what was found has arrived."""

from __future__ import annotations

import logging
from uuid import UUID

from exaserve_ops.controllers.fleet_state import FleetState, NodeView
from exaserve_ops.controllers.ports import FindingsReader
from exaserve_ops.inventory.domain.liveness import DEAD, RETIRED
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import OpsError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.serving.domain.model_import import FAILED, ImportFacts, ImportStep, next_step
from exaserve_ops.serving.models import ModelImport
from exaserve_ops.serving.selectors.imports import findings_of, live_imports, seconds_in_status
from exaserve_ops.serving.services.imports import fail_import, record_import, register_import
from exaserve_ops.weights.domain.held import IMPORT_FOUND, ImportSight
from exaserve_ops.weights.models import NodeStore

LOOK_EVERY_SECONDS = 1.0
ACTOR = "controller:imports"

_log = logging.getLogger(__name__)


class ImportWatch:
    """One look at all imports a step."""

    def __init__(self, state: FleetState, findings: FindingsReader) -> None:
        self._state = state
        self._findings = findings
        self._marks: dict[UUID, tuple[object, ...]] = {}
        """What was written down last of each: equal sights are not written again."""

    def step(self) -> None:
        """Compare what is recorded with what nodes tell; one that cannot be recorded holds up no other."""
        rows = live_imports()
        revisions = dict(
            NodeStore.objects.filter(node__in={row.node_id for row in rows}).values_list(
                "node", "wish_revision"
            )
        )
        self._marks = {row.pk: self._marks[row.pk] for row in rows if row.pk in self._marks}
        for row in rows:
            try:
                self._look(row, wish_revision=revisions.get(row.node_id, 0))
            except (IllegalTransitionError, ModelImport.DoesNotExist) as error:
                _log.info("event=import_overtaken import=%s error=%s", row.pk, error)

    def _look(self, row: ModelImport, *, wish_revision: int) -> None:
        view = self._state.node(str(row.node_id))
        sight = _sight_of(view, row)
        now = clock.now()
        found = None
        if sight is not None and sight.state == IMPORT_FOUND and row.status != FAILED:
            found = findings_of(row.pk)
            if found is not None and found[0] == sight.findings_digest:
                self._register(row, found)
                return
        facts = ImportFacts(
            status=row.status,
            attempt=row.attempt,
            in_status_seconds=seconds_in_status(row, now),
            node_in_service=row.node.liveness != RETIRED,
            node_alive=view.liveness != DEAD,
            node_told=_revision_of(view) == wish_revision > 0,
            sight=sight,
            parts_missing=found is None,
        )
        self._record(row, next_step(facts), sight)

    def _register(self, row: ModelImport, found: tuple[str, bytes]) -> None:
        digest, data = found
        try:
            model = register_import(row.pk, self._findings.read(data, digest), actor=ACTOR, now=clock.now())
            _log.info("event=model_imported model=%s revision=%s", model.name, model.digest[:19])
        except OpsError as error:
            fail_import(row.pk, str(error), actor=ACTOR, now=clock.now())

    def _record(self, row: ModelImport, step: ImportStep, sight: ImportSight | None) -> None:
        mark = (row.status, row.attempt, step, sight)
        if self._marks.get(row.pk) == mark:
            return
        record_import(row.pk, step, sight, actor=ACTOR, now=clock.now())
        self._marks[row.pk] = mark


def _sight_of(view: NodeView, row: ModelImport) -> ImportSight | None:
    told = view.heartbeat.weights if view.heartbeat is not None else None
    if told is None:
        return None
    return next((one for one in told.imports if one.import_id == str(row.pk)), None)


def _revision_of(view: NodeView) -> int:
    told = view.heartbeat.weights if view.heartbeat is not None else None
    return told.revision if told is not None else -1
