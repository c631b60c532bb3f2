"""Takes in which ready replicas gateways can connect to: until one has, a replica counts for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from uuid import UUID

from django.db.models import Q, QuerySet

from exaserve_ops.lib import clock
from exaserve_ops.serving.domain.lifecycle import READY
from exaserve_ops.serving.domain.reach import (
    PARTLY,
    REACHED,
    UNCHECKED,
    UNREACHABLE,
    WAITING,
    ReachFacts,
    ReachVerdict,
    judge_reach,
)
from exaserve_ops.serving.models import Replica
from exaserve_ops.serving.services.reach import record_reach

RECORDED_AT_ONCE = 512
"""The rest follows with the next step: no transaction may take as long as thousands do."""


class ReachSource(Protocol):
    """What gateways say."""

    def read(self) -> dict[str, dict[str, str]]:
        """Living gateways, and of each the reasons by replica id."""
        ...

    def reached(self, gateway: str, tokens: Sequence[str]) -> list[bool]:
        """Whether a gateway has connected to each of these places."""
        ...


class PlaceToken(Protocol):
    """How gateways name one start of a replica at one port."""

    def __call__(self, replica_id: str, attempt: int, port: int, /) -> str:
        """Return the name."""
        ...


class ReachRecorder:
    """The loop between gateways' findings and the record; writes only what changed."""

    def __init__(self, source: ReachSource, place_token: PlaceToken) -> None:
        self._source = source
        self._place_token = place_token

    def step(self) -> None:
        """Compare once."""
        said = self._source.read()
        rows = list(_in_question(said))
        tokens = [self._place_token(str(r.pk), r.attempt, _port(r.address)) for r in rows]
        reached = {gateway: self._source.reached(gateway, tokens) for gateway in said if tokens}
        verdicts: dict[UUID, ReachVerdict] = {}
        for number, row in enumerate(rows):
            reasons = {g: words[str(row.pk)] for g, words in said.items() if str(row.pk) in words}
            by = [g for g in said if reached[g][number] and g not in reasons]
            verdict = judge_reach(_facts(row), said, reasons, by)
            if (verdict.reach, verdict.reason) != (row.reach, row.unroutable_reason):
                verdicts[row.pk] = verdict
            if len(verdicts) == RECORDED_AT_ONCE:
                break
        if verdicts:
            record_reach(verdicts, actor="controller:reach", now=clock.now())


def _in_question(said: Mapping[str, Mapping[str, str]]) -> QuerySet[Replica]:
    """Ready replicas of which something was said, or that nothing certain is known of."""
    open_ones = (WAITING, UNREACHABLE, PARTLY, UNCHECKED) if said else (WAITING, UNREACHABLE, PARTLY)
    uncertain = Q(reach__in=open_ones, role=Replica.Role.SERVING) | ~Q(unroutable_reason="")
    idle = Q(role=Replica.Role.STANDBY) & ~Q(reach=UNCHECKED)
    named = Q(reach=REACHED, pk__in=_uuids({key for words in said.values() for key in words}))
    rows = Replica.objects.filter(uncertain | idle | named, status=READY).select_related("node")
    return rows.only("pk", "attempt", "address", "role", "reach", "unroutable_reason", "node__simulated")


def _facts(row: Replica) -> ReachFacts:
    return ReachFacts(
        row.reach,
        row.unroutable_reason,
        serves=row.role == Replica.Role.SERVING,
        simulated=row.node is not None and row.node.simulated,
    )


def _port(address: str) -> int:
    text = address.rpartition(":")[2]
    return int(text) if text.isdecimal() else 0


def _uuids(texts: set[str]) -> list[UUID]:
    found = []
    for text in texts:
        try:
            found.append(UUID(text))
        except ValueError:
            continue
    return found
