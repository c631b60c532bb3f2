"""From what the control plane says to a source that can be read."""

from __future__ import annotations

from workers.protocol.weights import WeightsSource
from workers.weights.secrets import SecretError, Secrets
from workers.weights.sources.folder import FolderSource
from workers.weights.sources.http import HttpSource
from workers.weights.sources.port import RefusedError, Source, SourceError
from workers.weights.sources.s3 import S3Source


def open_source(told: WeightsSource, secrets: Secrets, *, allow_local: bool = False) -> Source:
    """Make a source. Raises `SourceError` for one that cannot be used on this node.

    `allow_local`: connections may lead to addresses that only mean something to this host.
    """
    try:
        secret = secrets.read(told.secret) if told.secret else ""
    except SecretError as error:
        raise RefusedError(str(error)) from error
    match told.kind:
        case "folder":
            return FolderSource(told.location)
        case "http" | "hub":
            return HttpSource(told.location, kind=told.kind, token=secret, allow_local=allow_local)
        case "s3":
            return S3Source(told.location, secret, allow_local=allow_local)
        case _:
            raise SourceError(f"sources of kind {told.kind!r} are not known to this agent")
