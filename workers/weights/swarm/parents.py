"""Whom a stripe is pulled from next. Pure but for the clock that is handed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ORIGIN = "origin"
"""The control plane's word for where the weights come from in the first place."""

_FIRST_BACK_OFF_SECONDS = 0.5
_LONGEST_BACK_OFF_SECONDS = 5.0
_BUSY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Parent:
    """One whom a stripe may be pulled from."""

    node_id: str
    """Or `ORIGIN`, which has no address here."""
    host: str = ""
    port: int = 0


@dataclass(slots=True)
class Standing:
    """What this node has seen of a parent, for as long as it is in the swarm."""

    bad_pieces: int = 0
    failures: int = 0
    """In a row."""
    not_before: float = 0.0
    lives: bool = True
    """It answered when it was asked last, be it only that it has nothing to give."""
    why: str = ""


class ParentChoice:
    """Parents of one stripe in the order of the plan, and what came of each."""

    def __init__(
        self,
        standings: dict[str, Standing],
        *,
        strikes: int,
        origin_patience_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._standings = standings
        self._strikes = strikes
        self._patience = origin_patience_seconds
        self._clock = clock
        self._parents: tuple[Parent, ...] = ()
        self._alone_since: float | None = None

    def set(self, parents: Sequence[Parent]) -> None:
        """Follow a new plan: whom it names first is asked first, whatever failed before."""
        changed = parents[:1] != list(self._parents[:1])
        self._parents = tuple(parents)
        if changed and parents:
            standing = self._of(parents[0])
            standing.not_before, standing.failures = 0.0, 0

    def next(self) -> Parent | None:
        """Return whom to ask now; nobody while each one that may be asked has failed just now."""
        now = self._clock()
        fit = [p for p in self._parents if not self.is_struck(p.node_id)]
        ready = next((p for p in fit if self._of(p).not_before <= now), None)
        if ready is None:
            return None
        if ready.node_id == ORIGIN and ready != self._parents[0]:
            # Not planned: the control plane is given time to name another, so that few turn to the origin.
            if self._alone_since is None:
                self._alone_since = now
            return ready if now - self._alone_since >= self._patience else None
        self._alone_since = None
        return ready

    def went_well(self, parent: Parent) -> None:
        """A piece came and was right."""
        standing = self._of(parent)
        standing.failures, standing.lives, standing.why = 0, True, ""

    def failed(self, parent: Parent, why: str, *, refused: bool = False) -> None:
        """It did not answer, broke off, refused, or had nothing for too long."""
        standing = self._of(parent)
        standing.lives = refused
        standing.failures += 1
        wait = min(_FIRST_BACK_OFF_SECONDS * 2 ** (standing.failures - 1), _LONGEST_BACK_OFF_SECONDS)
        standing.not_before = self._clock() + wait
        standing.why = why

    def busy(self, parent: Parent) -> None:
        """It has no stream free; that is no fault."""
        standing = self._of(parent)
        standing.lives, standing.not_before = True, self._clock() + _BUSY_SECONDS

    def prefers_another(self, parent: Parent) -> bool:
        """Whether the planned parent, which was busy or not ready, may be asked again instead of this one."""
        first = self._parents[0] if self._parents else parent
        if first == parent or self.is_struck(first.node_id):
            return False
        standing = self._of(first)
        return standing.lives and standing.not_before <= self._clock()

    def bad_piece(self, parent: Parent) -> bool:
        """A piece was not what the manifest says. Returns whether it is struck out now."""
        standing = self._of(parent)
        standing.bad_pieces += 1
        standing.why = f"{standing.bad_pieces} of its pieces were damaged"
        return self.is_struck(parent.node_id)

    def is_struck(self, node_id: str) -> bool:
        """Whether it sent too many bad pieces to be asked again."""
        standing = self._standings.get(node_id)
        return standing is not None and standing.bad_pieces >= self._strikes

    def _of(self, parent: Parent) -> Standing:
        return self._standings.setdefault(parent.node_id, Standing())
