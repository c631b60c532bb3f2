"""Puts agents on machines over SSH: as many at a time as there may be connections, none of them twice."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from uuid import UUID

from django.db import connections

from exaserve_ops.controllers.installation_run import (
    ACTOR,
    InstallationRun,
    InterruptedRunError,
    Sites,
    Vault,
)
from exaserve_ops.health.selectors import healing_freeze
from exaserve_ops.inventory.domain.installation import NEW, QUEUED, StepFailedError, judge_pins
from exaserve_ops.inventory.models import NodeInstallation
from exaserve_ops.inventory.selectors import dead_agents_to_restart, due_installations, target_of
from exaserve_ops.inventory.services.installations import (
    advance_installation,
    record_offer,
    restart_dead_agent,
    take_over_runs,
)
from exaserve_ops.lib import clock

HEALER = "controller:health"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InstallationPorts:
    """What installations need from outside."""

    sites: Sites
    vault: Vault
    max_connections: int = 4


class Installations:
    """The loop: looks for what is due, and gives each a thread and a connection of its own."""

    def __init__(self, ports: InstallationPorts, stop: threading.Event) -> None:
        self._ports = ports
        self._stop = stop
        self._lock = threading.Lock()
        self._busy: dict[UUID, tuple[str, int]] = {}
        self._took_over = False

    def step(self) -> None:
        """Look once; whatever takes long runs elsewhere."""
        if not self._took_over:
            left = take_over_runs(actor=ACTOR, now=clock.now())
            self._took_over = True
            if left:
                _log.info("event=installations_taken_over count=%d", left)
        self._restart_dead_agents()
        for row in due_installations():
            if self._claim(row):
                name = f"installation-{str(row.pk)[:8]}"
                threading.Thread(target=self._work, args=(row.pk,), name=name, daemon=True).start()

    def is_idle(self) -> bool:
        """Whether nothing is being worked on."""
        with self._lock:
            return not self._busy

    def _claim(self, row: NodeInstallation) -> bool:
        """Take a free connection; one at a time for each server, which may drop more that begin at once."""
        place = (row.host, row.port)
        with self._lock:
            full = len(self._busy) >= self._ports.max_connections
            if full or row.pk in self._busy or place in self._busy.values():
                return False
            self._busy[row.pk] = place
            return True

    def _restart_dead_agents(self) -> None:
        dead = list(dead_agents_to_restart())
        if dead and healing_freeze():
            return  # so many died at once that the observer is suspected first
        for row in dead:
            restart_dead_agent(row.pk, actor=HEALER, now=clock.now())
            _log.warning("event=dead_agent_restart_over_ssh installation=%s node=%s", row.pk, row.node_id)

    def _work(self, installation_id: UUID) -> None:
        try:
            self._advance(installation_id)
        except InterruptedRunError as error:
            _log.info("event=installation_interrupted installation=%s", error)
        except Exception:  # noqa: BLE001 - a thread's top: the installation must not seem to go on
            _log.exception("event=installation_failed installation=%s", installation_id)
            self._give_up(installation_id)
        finally:
            connections.close_all()
            with self._lock:
                self._busy.pop(installation_id, None)

    def _advance(self, installation_id: UUID) -> None:
        row = NodeInstallation.objects.get(pk=installation_id)
        if row.status == NEW:
            row = self._compare_key(row)
        if row.status == QUEUED:
            InstallationRun(self._ports.sites, self._ports.vault, self._stop).run(installation_id)

    def _compare_key(self, row: NodeInstallation) -> NodeInstallation:
        """Fetch the host key; go on by ourselves only where it is pinned."""
        target = target_of(row)
        try:
            offered = self._ports.sites.fetch_host_key(target)
            pinned = judge_pins(offered, target.pins, host=target.host, port=target.port)
        except StepFailedError as error:
            return advance_installation(row.pk, "broke", reason=str(error), actor=ACTOR, now=clock.now())
        return record_offer(row.pk, offered, pinned=pinned, actor=ACTOR, now=clock.now())

    def _give_up(self, installation_id: UUID) -> None:
        reason = "an error that nobody expected; the log of the controllers has it. Try again."
        connections.close_all()
        try:
            advance_installation(installation_id, "broke", reason=reason, actor=ACTOR, now=clock.now())
        except Exception:  # noqa: BLE001 - the database may be away: the next controller takes it over
            _log.exception("event=installation_not_given_up installation=%s", installation_id)
