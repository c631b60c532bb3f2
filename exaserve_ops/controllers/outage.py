"""Times in which we could not listen: silence of that time is ours, not the nodes'."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from exaserve_ops.controllers.fleet_state import NodeView
from exaserve_ops.health.domain.incident import NO_LEADER, OBSERVER_AWAY, OPEN
from exaserve_ops.health.models import Incident
from exaserve_ops.health.services.incidents import open_incident, resolve_incident
from exaserve_ops.inventory.domain.liveness import ALIVE, SUSPECT
from exaserve_ops.lib import clock
from exaserve_ops.lib.errors import ConflictError

ACTOR = "controller:guard"
DEAF_AFTER_SECONDS = 1.5
"""Reports could not be read, or nobody judged them, for so long: everybody gets a full count anew."""
INCIDENT_AFTER_SECONDS = 5.0
IDLE_INCIDENT_AFTER_SECONDS = 10.0
SETTLE_SECONDS = 10.0
"""How long a node may take to report after an outage: agents reconnect with a back-off of 5 s and give
up on a dead connection after 3."""


class Outage:
    """What the detector knows of its own absences. Times are seconds of our monotonic clock."""

    def __init__(self, now: float) -> None:
        self.watching_since = now
        self._last_step = now
        self._deaf_since: float | None = None
        self._heard_again = -1e9
        """When reports could be read again, after the last outage of the store."""
        self._incident: Incident | None = None

    def begin(self, now: float, idle_seconds: float, views: Sequence[NodeView]) -> None:
        """Start to listen; whoever led before was last heard of so long ago."""
        self.watching_since = self._last_step = now
        self._incident = Incident.objects.filter(status=OPEN, kind__in=(NO_LEADER, OBSERVER_AWAY)).first()
        if idle_seconds < IDLE_INCIDENT_AFTER_SECONDS or not views:
            return
        self._heard_again = now
        self._incident = self._incident or _open(NO_LEADER, f"no controller led for {idle_seconds:.0f} s")

    def note(self, now: float, last_read_seconds: float, views: Sequence[NodeView]) -> None:
        """Take stock before a round of verdicts."""
        deaf = now - last_read_seconds > DEAF_AFTER_SECONDS
        if deaf or now - self._last_step > DEAF_AFTER_SECONDS:
            self.watching_since = now
        self._last_step = now
        if deaf:
            self._deaf_since = self._deaf_since or last_read_seconds
            self._heard_again = now
            if self._incident is None and now - self._deaf_since > INCIDENT_AFTER_SECONDS:
                silence = now - self._deaf_since
                self._incident = _open(OBSERVER_AWAY, f"no report could be read for {silence:.0f} s")
            return
        self._deaf_since = None
        if self._incident is not None:
            self._settle(self._incident, views, now)

    def excuses(self, view: NodeView, now: float) -> bool:
        """Whether a node may still be on its way back from an outage that was not its own."""
        unheard = (view.last_report_seconds or 0.0) < self._heard_again
        return unheard and now - self._heard_again < SETTLE_SECONDS

    def _settle(self, incident: Incident, views: Sequence[NodeView], now: float) -> None:
        away = [view for view in views if view.liveness in {ALIVE, SUSPECT} and self.excuses(view, now)]
        if away:
            return
        with contextlib.suppress(ConflictError):  # a person ended it
            resolve_incident(
                incident.pk, resolution="reports are read and judged again", actor=ACTOR, now=clock.now()
            )
        self._incident = None


def _open(kind: str, evidence: str) -> Incident:
    return open_incident(kind, scope="fleet", node_ids=(), evidence=evidence, actor=ACTOR, now=clock.now())
