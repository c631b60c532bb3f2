"""What a node is told to have on its disk, from the claims of all who want something there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PREWARM = "prewarm"
"""Owner of what a prewarm policy claims."""
PERSON = "person"
"""Owner of what somebody asked for by hand."""
REPLICA = "replica"
"""Owner of what replicas on the node start from; not recorded, since the replicas are."""
ROLLOUT = "rollout:"
"""Begins the owner of what a rollout claims."""

COMPILED = "compiled"
"""Owner of what engines compiled and replicas may start with; not recorded, for it follows the weights."""

PRIORITIES = {REPLICA: 100, COMPILED: 90, "rollout": 50, PERSON: 20, PREWARM: 10}
"""What is fetched first; replicas wait for what is at 100, and for nothing below."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One place that has a revision's files."""

    kind: str
    """`folder`, `http`, `s3` or `hub`."""
    location: str
    secret: str = ""
    """Name of a secret on the nodes, never the secret."""


@dataclass(frozen=True, slots=True)
class Revision:
    """One model's bytes, and where they come from, nearest first."""

    digest: str
    manifest_digest: str
    total_bytes: int
    name: str
    origins: tuple[Origin, ...] = ()
    engine_cache: str = ""
    """Not weights, but what this engine compiled: put into its cache on the node."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One owner wants one revision on a node."""

    revision: str
    owner: str
    paused: bool = False
    bytes_per_second: int = 0
    """0: as fast as it goes."""


@dataclass(frozen=True, slots=True)
class SwarmAddress:
    """One whom pieces may be pulled from: a node, or the origin, which has no address here."""

    node_id: str
    host: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class SwarmPart:
    """A node's part in the swarm of a revision."""

    key_epoch: int
    stripes: tuple[tuple[SwarmAddress, ...], ...] = ()
    """For each stripe whom to pull from, the planned parent first; none for who only gives, or waits."""


@dataclass(frozen=True, slots=True)
class WantedWeights:
    """One revision as its node is told to have it."""

    revision: Revision
    paused: bool
    bytes_per_second: int
    priority: int
    swarm: SwarmPart | None = None
    """`None`: it is fetched straight from its origins."""


@dataclass(frozen=True, slots=True)
class WantedImport:
    """One model as its node is told to take it in."""

    import_id: str
    name: str
    origin: Origin
    revision: str
    """Of a hub: branch, tag or commit; empty: `main`."""
    files: tuple[str, ...]
    attempt: int
    paused: bool
    """It failed: what is there is kept, and nothing is done."""


def combine_claims(claims: Iterable[Claim], revisions: Mapping[str, Revision]) -> tuple[WantedWeights, ...]:
    """What a node is told: of several claims on a revision the most urgent one counts.

    Paused only where every owner paused it; capped only where every owner capped it. Revisions that
    nobody knows any more are left out.
    """
    by_revision: dict[str, list[Claim]] = {}
    for claim in claims:
        by_revision.setdefault(claim.revision, []).append(claim)
    return tuple(
        _combined(revisions[digest], together)
        for digest, together in sorted(by_revision.items())
        if digest in revisions
    )


def priority_of(owner: str) -> int:
    """What is fetched first."""
    return PRIORITIES.get(owner.partition(":")[0], PRIORITIES[PREWARM])


def digest_of(wanted: Sequence[WantedWeights], imports: Sequence[WantedImport] = ()) -> str:
    """Equal for equal wishes."""
    wish = (tuple(wanted), tuple(imports)) if imports else tuple(wanted)
    return hashlib.sha256(repr(wish).encode()).hexdigest()


def _combined(revision: Revision, claims: Sequence[Claim]) -> WantedWeights:
    running = [claim for claim in claims if not claim.paused] or claims
    capped = all(claim.bytes_per_second for claim in running)
    return WantedWeights(
        revision=revision,
        paused=all(claim.paused for claim in claims),
        bytes_per_second=max(claim.bytes_per_second for claim in running) if capped else 0,
        priority=max(priority_of(claim.owner) for claim in running),
    )
