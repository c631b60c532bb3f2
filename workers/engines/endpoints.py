"""One table for each engine: on which paths it answers what, and the versions that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workers.engines.base import EngineRequest
from workers.protocol.engines.option import Version

SLEEP, WAKE = "sleep", "wake"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path that an engine has had."""

    path: str
    method: str = "GET"
    body: bytes = b""
    since: Version = ()
    until: Version = ()
    """First version without it; empty: the newest has it."""

    def is_in(self, version: Version) -> bool:
        """Whether this version has it; one that is not known counts as the newest."""
        if not version:
            return not self.until
        return version >= self.since and (not self.until or version < self.until)


EndpointTable = Mapping[str, tuple[Endpoint, ...]]
"""By what they are for, the newest first."""


def find_endpoint(table: EndpointTable, what: str, version: Version) -> EngineRequest | None:
    """Return how a version is asked; `None` where it cannot be."""
    found = next((endpoint for endpoint in table.get(what, ()) if endpoint.is_in(version)), None)
    return None if found is None else EngineRequest(found.path, found.method, found.body)
