"""What the pages need from outside. The wiring hands it in; tests hand in their own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from exaserve_ops.inventory.domain.installation import Credentials
from exaserve_ops.serving.services.models import ModelFacts
from exaserve_ops.telemetry.domain.pictures import LogEntry


class LiveReader(Protocol):
    """Reads what the controllers publish for live pages."""

    async def fetch_frame(self) -> bytes | None:
        """Newest value frame, as `telemetry.domain.frames` describes."""
        ...

    async def fetch_summary(self) -> bytes | None:
        """Newest summary: JSON text with the figures of the fleet page and their history."""
        ...

    async def fetch_log(self, replica_id: str, after: str, limit: int) -> list[LogEntry]:
        """Log entries after a position (`0` for all that is kept), oldest first."""
        ...

    def read_node(self, node_id: str) -> dict[str, Any] | None:
        """Last telemetry of a node and its replicas, for a page; `None` where nothing was reported."""
        ...

    def read_nodes(self, node_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """The same for many nodes at once; without those that have reported nothing."""
        ...

    def read_layout(self) -> bytes | None:
        """Newest heatmap layout: JSON text with `version`, `statuses`, `metrics`, `rows`, `columns`."""
        ...

    def read_summary(self) -> dict[str, Any] | None:
        """The newest summary, for a page."""
        ...


class _Slot:
    reader: LiveReader | None = None


def use_live_reader(reader: LiveReader) -> None:
    """Hand in the reader that pages and consumers use."""
    _Slot.reader = reader


def live_reader() -> LiveReader:
    """Return the reader. Raises `RuntimeError` where the wiring has not handed one in."""
    if _Slot.reader is None:
        raise RuntimeError("no live reader: the entry point must call wiring.connect_pages()")
    return _Slot.reader


class ModelFolderReader(Protocol):
    """Reads a model's folder on the control-plane machine."""

    def read(self, path: str) -> ModelFacts:
        """Files and architecture of the model in a folder.

        Raises `InvalidInputError` (field `path`) where the folder holds no model that can be served.
        """
        ...


class _FolderSlot:
    reader: ModelFolderReader | None = None


def use_model_folder_reader(reader: ModelFolderReader) -> None:
    """Hand in the reader that the model form uses."""
    _FolderSlot.reader = reader


def model_folder_reader() -> ModelFolderReader:
    """Return the reader. Raises `RuntimeError` where the wiring has not handed one in."""
    if _FolderSlot.reader is None:
        raise RuntimeError("no model folder reader: the entry point must call wiring.connect_pages()")
    return _FolderSlot.reader


class CredentialVault(Protocol):
    """Keeps passwords and private keys for the controllers, sealed and for a short time."""

    def keep(self, installation_id: str, credentials: Credentials) -> None:
        """Keep the credentials of an installation, in place of earlier ones."""
        ...

    def forget(self, installation_id: str) -> None:
        """Forget them."""
        ...


class _VaultSlot:
    vault: CredentialVault | None = None


def use_credential_vault(vault: CredentialVault) -> None:
    """Hand in what keeps credentials."""
    _VaultSlot.vault = vault


def credential_vault() -> CredentialVault:
    """Return the vault. Raises `RuntimeError` where the wiring has not handed one in."""
    if _VaultSlot.vault is None:
        raise RuntimeError("no credential vault: the entry point must call wiring.connect_pages()")
    return _VaultSlot.vault
