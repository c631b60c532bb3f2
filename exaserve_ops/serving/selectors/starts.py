"""Reading of what starts, what waits for its turn to, and how a staged start goes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any
from uuid import UUID

from django.db.models import Count, Q

from exaserve_ops.inventory.domain.liveness import DEAD
from exaserve_ops.inventory.models import Node
from exaserve_ops.inventory.selectors import rack_of
from exaserve_ops.serving.domain import lifecycle as states
from exaserve_ops.serving.domain.starts import (
    Starter,
    StartFacts,
    StartLimits,
    StartNode,
    WeightsAtHand,
)
from exaserve_ops.serving.models import Model, Replica, StagedStart, StartRules
from exaserve_ops.serving.selectors.members import WAITS_TO_START, live_members, member_nodes
from exaserve_ops.weights.domain.held import FAILED, FETCHING, READY, WAITING
from exaserve_ops.weights.models import NodeWeights, WeightsClaim

_ON_THEIR_WAY = (states.PLACED, states.STARTING, states.LOADING)
_READ = (
    *("pk", "name", "deployment_id", "node_id", "status", "status_changed_at", "role", "replaces_id"),
    *("start_waits_since", "start_allowed_at", "deployment__start_seconds", "node_count"),
    *("release__model__digest", "release__model__storage"),
)


def has_starts_to_decide() -> bool:
    """Whether somebody waits for a turn, or did and is not done. Two short queries."""
    return (
        Replica.objects.filter(WAITS_TO_START).exists() or StagedStart.objects.filter(ended_at=None).exists()
    )


def start_limits() -> StartLimits:
    """How much may start at once."""
    row = StartRules.objects.first()
    if row is None:
        return StartLimits()
    return StartLimits(**{name: getattr(row, name) for name in asdict(StartLimits())})


def start_facts(swarming: Collection[str]) -> StartFacts:
    """All that the turns are decided from, in ten queries.

    `swarming`: ids of nodes that give weights to others and take them from there, as their reports say.
    """
    rows = list(
        Replica.objects.filter(status__in=_ON_THEIR_WAY, wanted=Replica.Wanted.RUN, node__isnull=False)
        .order_by()
        .values_list(*_READ, named=True)
    )
    gangs = member_nodes([row.pk for row in rows if row.node_count > 1])
    starters = tuple(_starter(row, gangs.get(row.pk, ())) for row in rows)
    weights = _weights({one.revision for one in starters})
    node_ids = {pk for one in starters for pk in one.node_ids} | {node_id for node_id, _ in weights.fetching}
    ready = Replica.objects.filter(status=states.READY).order_by().values_list("deployment")
    return StartFacts(
        starters=starters,
        nodes=_nodes(node_ids, swarming),
        weights=weights,
        ready={str(pk): count for pk, count in ready.annotate(Count("pk"))},
        limits=start_limits(),
    )


def _starter(row: Any, members: tuple[UUID, ...]) -> Starter:  # noqa: ANN401 - a row of `_READ`
    return Starter(
        id=str(row.pk),
        name=row.name,
        deployment=str(row.deployment_id),
        node_id=str(row.node_id),
        revision=row.release__model__digest,
        status=row.status,
        status_since=row.status_changed_at,
        waits_since=row.start_waits_since if row.status == states.PLACED else None,
        allowed_at=row.start_allowed_at or row.status_changed_at,
        start_seconds=float(row.deployment__start_seconds),
        in_place=row.release__model__storage == Model.Storage.IN_PLACE,
        standby=row.role == Replica.Role.STANDBY,
        takes_over=row.replaces_id is not None,
        others=tuple(map(str, members[1:])),
    )


def _nodes(node_ids: Collection[str], swarming: Collection[str]) -> dict[str, StartNode]:
    rows = Node.objects.filter(pk__in=node_ids).select_related("failure_domain__parent__parent")
    return {
        str(node.pk): StartNode(
            node.name, rack_of(node), offline=node.liveness == DEAD, swarms=str(node.pk) in swarming
        )
        for node in rows
    }


def _weights(revisions: Collection[str]) -> WeightsAtHand:
    """Where these revisions are, and where any is being fetched."""
    states_of: dict[str, set[tuple[str, str]]] = {}
    wanted = Q(revision__in=revisions) | Q(state__in=(FETCHING, WAITING))
    seeded = set()
    for node_id, revision, state, in_use in NodeWeights.objects.filter(wanted).values_list(
        "node_id", "revision", "state", "in_use"
    ):
        states_of.setdefault(state, set()).add((str(node_id), revision))
        if state == READY and in_use:
            seeded.add(revision)
    claimed = WeightsClaim.objects.filter(revision__in=revisions).values_list("node_id", "revision")
    here = states_of.get(READY, set())
    seeded |= {revision for node_id, revision in claimed if (str(node_id), revision) in here}
    return WeightsAtHand(
        here=frozenset(here | _read_in_place()),
        fetching=frozenset(states_of.get(FETCHING, set()) | states_of.get(WAITING, set())),
        failed=frozenset(states_of.get(FAILED, set())),
        seeded=frozenset(seeded),
    )


def _read_in_place() -> set[tuple[str, str]]:
    """Nodes whose memory holds weights that a ready replica there has read from where they lie."""
    rows = Replica.objects.filter(
        status=states.READY, node__isnull=False, release__model__storage=Model.Storage.IN_PLACE
    )
    found: set[tuple[UUID, str]] = set(
        rows.order_by().values_list("node", "release__model__digest").distinct()
    )
    members = live_members().filter(
        replica__status=states.READY, replica__release__model__storage=Model.Storage.IN_PLACE
    )
    found |= set(members.values_list("node", "replica__release__model__digest"))
    return {(str(node_id), digest) for node_id, digest in found}
