"""What REST needs from outside. The wiring hands it in; tests hand in their own."""

from __future__ import annotations

from typing import Any, Protocol

from exaserve_ops.inventory.domain.installation import Credentials
from exaserve_ops.serving.services.models import ModelFacts


class ModelFolderReader(Protocol):
    """Reads a model's folder on the control plane's machine."""

    def read(self, folder: str) -> ModelFacts:
        """Files with digests, and what config.json says. Raises `InvalidInputError`."""
        ...


class ReplicaLoads(Protocol):
    """Reads the newest telemetry."""

    def read_node(self, node_id: str) -> dict[str, Any] | None:
        """Last telemetry of a node and its replicas; `None` where there is none or the store is away."""
        ...


class _Slots:
    folders: ModelFolderReader | None = None
    loads: ReplicaLoads | None = None


def use_model_folder_reader(reader: ModelFolderReader) -> None:
    """Hand in what reads models' folders."""
    _Slots.folders = reader


def use_replica_loads(loads: ReplicaLoads) -> None:
    """Hand in what reads live telemetry."""
    _Slots.loads = loads


def model_folder_reader() -> ModelFolderReader:
    """Return the reader of folders. Raises `RuntimeError` where the wiring has not handed one in."""
    if _Slots.folders is None:
        raise RuntimeError("no reader of model folders: the wiring must call use_model_folder_reader()")
    return _Slots.folders


def replica_loads() -> ReplicaLoads:
    """Return the reader of telemetry. Raises `RuntimeError` where the wiring has not handed one in."""
    if _Slots.loads is None:
        raise RuntimeError("no reader of telemetry: the wiring must call use_replica_loads()")
    return _Slots.loads


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
