"""Many nodes silent at once: suspect the observer, not the nodes.

A rack can lose its power; but a controller that cannot hear, a store that was away and a switch in
between look the same from here, and to declare half a fleet dead by mistake does more harm than to
wait for a second opinion. So mass silence withholds deaths: the nodes stay suspect, healing is
frozen, and it ends when they report again, when gateways cannot reach them either, or when a person
says so. One dead node, or a few, never wait for any of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

FLEET = "fleet"


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """What counts as too many at once."""

    domain_share: float = 0.5
    fleet_share: float = 0.2
    least_nodes: int = 3
    window_seconds: float = 10.0
    """A death counts as part of the same silence for so long."""
    settle_seconds: float = 10.0
    """After most have come back, how long the rest may take: agents reconnect with a back-off."""


@dataclass(frozen=True, slots=True)
class WatchedNode:
    """One node that was alive before the window began."""

    node_id: str
    domain: str
    """Rack; empty where none is known."""
    silent: bool
    """Suspect, or due to be declared dead."""
    dead: bool = False
    """Declared dead within the window."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Too many of one scope are silent."""

    scope: str
    node_ids: frozenset[str]
    """Those whose death is to be withheld."""
    evidence: str


@dataclass(frozen=True, slots=True)
class HeldSuspicion:
    """An incident that stands. `calm_since` is when its silence fell below the bound, if it has."""

    incident_id: str
    scope: str
    node_ids: frozenset[str]
    calm_since: float | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A suspicion that ended by itself."""

    held: HeldSuspicion
    resolution: str


@dataclass(frozen=True, slots=True)
class Ruling:
    """What follows for this round of verdicts."""

    withheld: frozenset[str] = frozenset()
    opened: tuple[Suspicion, ...] = ()
    standing: tuple[HeldSuspicion, ...] = ()
    ended: tuple[Ended, ...] = ()


@dataclass(frozen=True, slots=True)
class Reach:
    """What gateways say of one node's ready replicas."""

    ready: int
    unreachable: int


@dataclass(frozen=True, slots=True)
class _Crowd:
    watched: list[WatchedNode] = field(default_factory=list)

    @property
    def gone(self) -> int:
        return sum(node.silent or node.dead for node in self.watched)


def suspect_observer(nodes: Sequence[WatchedNode], settings: GuardSettings) -> tuple[Suspicion, ...]:
    """Scopes in which too many are silent: the whole fleet, else each failure domain by itself."""
    fleet = _suspect_crowd(FLEET, nodes, settings.fleet_share, settings)
    domains: dict[str, _Crowd] = {}
    for node in nodes:
        if node.domain:
            domains.setdefault(node.domain, _Crowd()).watched.append(node)
    in_domains = [
        suspicion
        for name, crowd in sorted(domains.items())
        if (suspicion := _suspect_crowd(f"rack {name}", crowd.watched, settings.domain_share, settings))
    ]
    if fleet is not None and not _one_domain_explains(fleet, in_domains):
        return (fleet,)
    return tuple(in_domains)


def rule(
    nodes: Sequence[WatchedNode], held: Iterable[HeldSuspicion], now: float, settings: GuardSettings
) -> Ruling:
    """Decide which deaths are withheld, and which suspicions open, stand and end. Pure."""
    found = suspect_observer(nodes, settings)
    silent = frozenset(node.node_id for node in nodes if node.silent)
    standing, ended = [], []
    for one in held:
        verdict = _follow(one, found, silent, now, settings)
        if isinstance(verdict, Ended):
            ended.append(verdict)
        else:
            standing.append(verdict)
    known: frozenset[str] = frozenset().union(*(one.node_ids for one in standing))
    opened = tuple(s for s in found if not s.node_ids <= known)
    withheld = silent & known.union(*(s.node_ids for s in opened))
    return Ruling(withheld, opened, tuple(standing), tuple(ended))


def is_silence_beginning(late: int, watched: int, settings: GuardSettings) -> bool:
    """Whether so many of all nodes are late that a death seen now may be the first of a mass silence.

    A node whose last messages were lost anyway is due before the others are even suspect. Whoever is due
    waits until they are, or report.
    """
    return late >= max(settings.least_nodes, math.ceil(settings.fleet_share * watched))


def is_confirmed_by_gateways(node_ids: frozenset[str], reach: Mapping[str, Reach]) -> str:
    """Why gateways leave no doubt that these nodes are gone; empty where they do.

    They must reach somebody else, or it is they who are cut off; and of the silent nodes they must
    reach nobody. Nodes without ready replicas say nothing either way.
    """
    inside = [reach[node_id] for node_id in node_ids if node_id in reach and reach[node_id].ready]
    others = [seen for node_id, seen in reach.items() if node_id not in node_ids and seen.ready]
    reached = sum(seen.unreachable < seen.ready for seen in others)
    if not inside or not reached or any(seen.unreachable < seen.ready for seen in inside):
        return ""
    if 2 * len(inside) < len(node_ids):
        return ""
    return (
        f"gateways reach none of the {sum(seen.ready for seen in inside)} replicas on "
        f"{len(inside)} of these nodes, and replicas on {reached} others"
    )


def _suspect_crowd(
    scope: str, nodes: Sequence[WatchedNode], share: float, settings: GuardSettings
) -> Suspicion | None:
    gone = _Crowd(list(nodes)).gone
    bound = max(settings.least_nodes, math.ceil(share * len(nodes)))
    silent = frozenset(node.node_id for node in nodes if node.silent)
    if gone < bound or not silent:
        return None
    return Suspicion(scope, silent, f"{gone} of {len(nodes)} nodes fell silent within seconds")


def _one_domain_explains(fleet: Suspicion, in_domains: Sequence[Suspicion]) -> bool:
    """Whether one rack is all that is silent: then it is that rack's incident, not the fleet's."""
    return len(in_domains) == 1 and in_domains[0].node_ids == fleet.node_ids


def _follow(
    held: HeldSuspicion,
    found: Sequence[Suspicion],
    silent: frozenset[str],
    now: float,
    settings: GuardSettings,
) -> HeldSuspicion | Ended:
    # One of the whole fleet takes in whatever is found while it stands: two rows would say the same.
    grown = [s.node_ids for s in found if held.scope in {s.scope, FLEET}]
    if grown:
        return HeldSuspicion(held.incident_id, held.scope, held.node_ids.union(*grown))
    left = held.node_ids & silent
    if not left:
        return Ended(held, f"all {len(held.node_ids)} nodes report again")
    if any(left <= suspicion.node_ids for suspicion in found):
        return HeldSuspicion(held.incident_id, held.scope, held.node_ids)  # part of a larger silence
    calm_since = now if held.calm_since is None else held.calm_since
    if now - calm_since >= settings.settle_seconds:
        back = len(held.node_ids) - len(left)
        return Ended(held, f"{back} of {len(held.node_ids)} nodes report again; {len(left)} do not")
    return HeldSuspicion(held.incident_id, held.scope, held.node_ids, calm_since)
