"""Takes in which ready replicas no gateway can connect to, so that they are not shown as well."""

from __future__ import annotations

from typing import Protocol
from uuid import UUID

from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.lifecycle import READY
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.replicas import record_reachability


class ReachSource(Protocol):
    """What gateways said."""

    def read(self) -> dict[str, str]:
        """Reason by replica id."""
        ...


class ReachRecorder:
    """The loop between gateways' findings and the record; writes only what changed."""

    def __init__(self, source: ReachSource) -> None:
        self._source = source

    def step(self) -> None:
        """Compare once."""
        said = self._source.read()
        recorded = dict(Replica.objects.exclude(unroutable_reason="").values_list("pk", "unroutable_reason"))
        ready = set(Replica.objects.filter(pk__in=_uuids(said), status=READY).values_list("pk", flat=True))
        wanted = {pk: said[str(pk)] for pk in ready}
        for pk in recorded.keys() | wanted.keys():
            if recorded.get(pk, "") != wanted.get(pk, ""):
                record_reachability(pk, wanted.get(pk, ""), actor="controller:reach", now=clock.now())


def _uuids(texts: dict[str, str]) -> list[UUID]:
    found = []
    for text in texts:
        try:
            found.append(UUID(text))
        except ValueError:
            continue
    return found
