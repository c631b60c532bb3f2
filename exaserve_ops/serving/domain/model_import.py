"""Imports: models that a node fetches from a hub, a server or a bucket, to be registered. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from exaserve_ops.lib.lifecycle import Lifecycle, table
from exaserve_ops.weights.domain.held import (
    IMPORT_FAILED,
    IMPORT_FETCHING,
    IMPORT_FOUND,
    IMPORT_LISTING,
    ImportSight,
)

WAITING = "waiting"
FETCHING = "fetching"
FAILED = "failed"
REGISTERED = "registered"
CANCELLED = "cancelled"

_OPEN = (WAITING, FETCHING)

MODEL_IMPORT = Lifecycle(
    name="model import",
    initial=WAITING,
    statuses=(WAITING, FETCHING, FAILED, REGISTERED, CANCELLED),
    final=frozenset({REGISTERED, CANCELLED}),
    transitions=table(
        [
            ("import_began", [WAITING], FETCHING),
            ("import_held_up", [FETCHING], WAITING),
            ("import_failed", _OPEN, FAILED),
            ("import_tried_again", [FAILED], WAITING),
            ("import_registered", _OPEN, REGISTERED),
            ("import_cancelled", [*_OPEN, FAILED], CANCELLED),
        ]
    ),
    meanings={
        WAITING: "Its node has not begun, or waits; the reason says what for.",
        FETCHING: "Its node fetches and hashes the files.",
        FAILED: "Not to be had as things are. What is there is kept until it is tried again or cancelled.",
        REGISTERED: "The model is registered, and its node has the weights.",
        CANCELLED: "Given up; its node drops what it fetched.",
    },
)

KEPT_FAILED_SECONDS = 24 * 3600.0
"""A failed import that nobody has tried again for so long is cancelled: its files take room."""


@dataclass(frozen=True, slots=True)
class ImportFacts:
    """One open or failed import, as recorded and as its node tells of it."""

    status: str
    attempt: int
    in_status_seconds: float
    node_in_service: bool
    node_alive: bool
    node_told: bool
    """The node has taken in the wish that names it."""
    sight: ImportSight | None
    parts_missing: bool = False
    """Something was found, and not all parts of it have arrived."""


@dataclass(frozen=True, slots=True)
class ImportStep:
    """What is to be recorded."""

    event: str = ""
    """Empty: it stays in its status."""
    reason: str = ""


def next_step(facts: ImportFacts) -> ImportStep:
    """Decide what becomes of an import; registering is no step of its own, since it takes the findings."""
    if facts.status == FAILED:
        over = facts.in_status_seconds >= KEPT_FAILED_SECONDS
        return ImportStep("import_cancelled", "nobody had it tried again within a day") if over else _STAYS
    if not facts.node_in_service:
        return ImportStep("import_failed", "its node was retired: cancel it, and import it with another")
    if not facts.node_alive:
        return _held_up(facts, "its node does not answer; it goes on when it is back")
    if facts.sight is None or facts.sight.attempt != facts.attempt:
        told = "its agent does not tell of it: is it of an older version?" if facts.node_told else ""
        return _held_up(facts, told or "its node is being told")
    return _as_seen(facts, facts.sight)


_STAYS = ImportStep()


def _as_seen(facts: ImportFacts, sight: ImportSight) -> ImportStep:
    if sight.state == IMPORT_FAILED:
        return ImportStep("import_failed", sight.reason)
    if sight.state not in (IMPORT_FETCHING, IMPORT_FOUND, IMPORT_LISTING):
        return _held_up(facts, sight.reason)
    reason = sight.reason or _words(sight, parts_missing=facts.parts_missing)
    return ImportStep("import_began" if facts.status == WAITING else "", reason)


def _held_up(facts: ImportFacts, reason: str) -> ImportStep:
    return ImportStep("import_held_up" if facts.status == FETCHING else "", reason)


def _words(sight: ImportSight, *, parts_missing: bool) -> str:
    if sight.state == IMPORT_LISTING:
        return "the place is asked for its files"
    if sight.state == IMPORT_FOUND:
        return "whole; what was found is on its way" if parts_missing else "whole; being registered"
    return f"{sight.files_done} of {sight.files} files are whole"


@dataclass(frozen=True, slots=True)
class ImportPlace:
    """A node that could take a model in."""

    node_id: str
    name: str
    accepts: bool
    """Alive, in use, real, and its store works."""
    free_bytes: int
    open_imports: int


def choose_node(places: Iterable[ImportPlace]) -> ImportPlace | None:
    """The node with the fewest imports, and of these the one with most room; `None`: none can."""
    fit = [place for place in places if place.accepts]
    return min(fit, key=lambda place: (place.open_imports, -place.free_bytes, place.name), default=None)
