"""What the pages need from outside. The wiring hands it in; tests hand in their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from exaserve_ops.inventory.domain.installation import CredentialVault
from exaserve_ops.lib.slots import Slot
from exaserve_ops.routing.domain.records import GatewayReport
from exaserve_ops.serving.services.compiled import CompiledFolderReader
from exaserve_ops.serving.services.models import ModelFolderReader
from exaserve_ops.sessions.domain.pace import MoveLimits
from exaserve_ops.telemetry.domain.pictures import LogEntry
from exaserve_ops.weights.domain.held import StoreSight
from exaserve_ops.weights.domain.swarm_notes import SwarmNotes


class LiveReader(Protocol):
    """Reads what the controllers publish for live pages."""

    async def fetch_frame(self) -> bytes | None:
        """Newest value frame, as `telemetry.domain.frames` describes."""
        ...

    async def fetch_summary(self) -> bytes | None:
        """Newest summary: JSON text with the figures of the fleet page and their history."""
        ...

    async def fetch_log(self, replica_id: str, member: int, after: str, limit: int) -> list[LogEntry]:
        """Log entries of a member (0: the head, or the only one) after a position, oldest first.

        `0` as the position: all that is kept.
        """
        ...

    def read_node(self, node_id: str) -> dict[str, Any] | None:
        """Last telemetry of a node and its replicas, for a page; `None` where nothing was reported."""
        ...

    def read_nodes(self, node_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """The same for many nodes at once; without those that have reported nothing."""
        ...

    def read_kv(self, node_id: str) -> dict[str, Any] | None:
        """KV memory of a node: `received_at`, `sequence`, `pools`, and `replicas` by id."""
        ...

    async def fetch_kv(self, node_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """The same of many nodes at once; without those that have reported nothing."""
        ...

    def read_weights(self, node_ids: Collection[str]) -> dict[str, StoreSight]:
        """Weights on the disks of nodes; without those that tell nothing of any."""
        ...

    def read_swarms(self) -> Mapping[str, SwarmNotes]:
        """Swarms of the last day as the leader noted them, by revision."""
        ...

    def read_layout(self) -> bytes | None:
        """Newest heatmap layout: JSON text with `version`, `statuses`, `metrics`, `rows`, `columns`."""
        ...

    def read_summary(self) -> dict[str, Any] | None:
        """The newest summary, for a page."""
        ...


class GatewayReports(Protocol):
    """Reads what gateways say of themselves."""

    def read(self) -> list[GatewayReport] | None:
        """Living gateways, by name; `None` where the store is away."""
        ...


live_reader: Slot[LiveReader] = Slot("reader of live pictures")
compiled_folder_reader: Slot[CompiledFolderReader] = Slot("reader of folders of compiled files")
model_folder_reader: Slot[ModelFolderReader] = Slot("reader of model folders")
gateway_reports: Slot[GatewayReports] = Slot("reports of gateways")
move_limits: Slot[MoveLimits] = Slot("limits of moves of sessions")
credential_vault: Slot[CredentialVault] = Slot("vault for credentials")
