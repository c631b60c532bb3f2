"""Drives rollouts: looks at each one, and carries out what it decides.

Everything is in the record, so another leader goes on where a dead one stopped; what the dead one still
tries is refused by the fence of its epoch.
"""

from __future__ import annotations

import logging

from django.db import DatabaseError

from exaserve_ops.controllers.loop import KeyQueue
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError
from exaserve_ops.lib.lifecycle import IllegalTransitionError
from exaserve_ops.rollouts.domain.actions import LetGo, Roll, Stay, Wait
from exaserve_ops.rollouts.domain.driving import decide
from exaserve_ops.rollouts.models import Rollout
from exaserve_ops.rollouts.selectors import live_rollouts, rollout_view
from exaserve_ops.rollouts.services.steps import ACTOR, carry_out
from exaserve_ops.rollouts.services.weights import bring_weights

LOOK_EVERY_SECONDS = 1.0
_UNREADABLE = "nobody can look at it: {error}. The leading controller's log says more"

_log = logging.getLogger(__name__)


class RolloutDriver:
    """One look at every rollout a step; keeps nothing in mind between two."""

    def __init__(self, queue: KeyQueue) -> None:
        self._queue = queue

    def step(self) -> None:
        """Bring every rollout on by what is due; one that cannot be read holds up no other."""
        for rollout in live_rollouts():
            try:
                self._drive(rollout)
            except DatabaseError:
                raise  # the store is away, for the others too
            except Exception as error:  # noqa: BLE001 - a loop's top: it is told on the rollout's page
                told = Wait(_UNREADABLE.format(error=error))
                if rollout.waits_for != told.why:  # once, not each second
                    _log.exception("event=rollout_unreadable rollout=%s", rollout.pk)
                carry_out(rollout, told, now=clock.now())

    def _drive(self, rollout: Rollout) -> None:
        now = clock.now()
        view = rollout_view(rollout, weights=bring_weights(rollout, actor=ACTOR, now=now), now=now)
        for action in decide(view, now):
            try:
                carry_out(rollout, action, now=now)
            except (ConflictError, IllegalTransitionError) as error:
                # Somebody came first; the next look sees what holds now.
                _log.info("event=rollout_overtaken rollout=%s error=%s", rollout.pk, error)
                return
            if isinstance(action, Roll | Stay | LetGo):
                self._queue.add("deployment", str(rollout.deployment_id))
