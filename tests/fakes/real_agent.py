"""An installed agent that is recorded as a node."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path

from exaserve_ops.inventory.models import FailureDomain
from exaserve_ops.inventory.models import Node as NodeRow
from tests.fakes.installed_agent import InstalledAgent
from tests.fakes.node import make_home
from tests.fakes.valkey import Valkey
from workers.agent import processes
from workers.agent.journal import Journal


class RealAgent(InstalledAgent):
    """An agent, recorded as a node, and all that it starts."""

    def __init__(self, folder: Path, store: Valkey, *, name: str, address: str) -> None:
        super().__init__(
            make_home(folder, store.url),
            store,
            {"EXAOPS_AGENT_ADDRESS": address, "EXAOPS_AGENT_STOP_GRACE_SECONDS": "2"},
        )
        domain = FailureDomain.objects.create(kind="host", name=name)
        self.pk = uuid.UUID(self.node_id)
        NodeRow.objects.create(pk=self.pk, name=name, failure_domain=domain)

    def lose_power(self) -> None:
        """SIGKILL for the agent and for every process that it started, as when the machine is off."""
        self.signal(signal.SIGKILL)
        for process in processes.labelled(self.node_id):
            processes.send(process, signal.SIGKILL)

    def row(self) -> NodeRow:
        """The record of it, as it is now."""
        return NodeRow.objects.get(pk=self.pk)

    def runs(self, replica_id: str) -> bool:
        """Whether a process of the replica lives here."""
        return any(label.replica_id == replica_id for label in processes.labelled(self.node_id).values())

    def attempts(self) -> dict[str, int]:
        """Launches so far of every replica, by the agent's own journal."""
        journal = Journal(self.home.journal_file)
        try:
            return {row.replica_id: row.last_attempt for row in journal.replicas()}
        finally:
            journal.close()
