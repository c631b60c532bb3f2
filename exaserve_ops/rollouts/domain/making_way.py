"""How replicas make way for those of another release, in either direction, a few at a time. Pure.

With room for one more, the successor is made first; its predecessor's sessions leave, and then it drains.
Without room the sessions leave first, the replica drains, and its successor starts in the freed place.
Nothing here is remembered between two looks: who is how far is read off the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from exaserve_ops.rollouts.domain.actions import Action, Leave, LetGo, Roll, Stay, Wait
from exaserve_ops.rollouts.domain.view import IN_PLACE, RolloutView, Seat


@dataclass(frozen=True, slots=True)
class Direction:
    """From which release to which, and how."""

    source: str
    target: str
    mode: str
    name: str
    """For people, such as `release 3`."""


def make_way(view: RolloutView, members: Sequence[Seat], direction: Direction, now: datetime) -> list[Action]:
    """The next actions for these replicas of the source release; empty where none is left of them."""
    left = [seat for seat in members if seat.is_wanted]
    if not left:
        return []
    idle = [s for s in left if not s.is_ready and not s.rolls_to]
    actions: list[Action] = []
    if idle:
        # Who serves nobody goes at once. Not in place: one that answers again meanwhile is not taken away.
        ids = tuple(s.replica_id for s in idle)
        actions.append(Roll(ids, direction.target, in_place=False, why=f"make way for {direction.name}"))
    serving = [s for s in left if s.is_ready or s.rolls_to]
    step = _in_place if direction.mode == IN_PLACE else _surge
    return [*actions, *step(view, serving, direction, now)]


def _surge(view: RolloutView, members: list[Seat], direction: Direction, now: datetime) -> list[Action]:
    actions: list[Action] = []
    successors = {s.replaces: s for s in view.seats if s.is_wanted and s.replaces}
    begun = [s for s in members if s.rolls_to]
    covered = [s for s in begun if s.replica_id in successors and successors[s.replica_id].is_ready]
    actions += _leave([s for s in covered if s.leaving_since is None], view, direction)
    gone = [s for s in covered if _has_left(s, view, now)]
    if gone:
        actions.append(LetGo(_ids(gone), f"{direction.name} took its place"))
    # Until the process of one that was let go has ended, it holds its room.
    ending = sum(not s.is_wanted and not s.is_gone and s.release == direction.source for s in view.seats)
    room = view.surge - len(begun) - ending
    fresh = [s for s in members if not s.rolls_to][: max(0, room)]
    if fresh:
        why = f"make way for {direction.name}, which is started beside them first"
        actions.append(Roll(_ids(fresh), direction.target, in_place=False, why=why))
    return actions or [Wait(_waiting(begun, successors, direction))]


def _in_place(view: RolloutView, members: list[Seat], direction: Direction, now: datetime) -> list[Action]:
    missing = view.missing
    back = [s for s in members if s.is_ready and s.rolls_to and not s.in_place and s.leaving_since is None]
    if back:
        return [Stay(_ids(back), "it answers again, and waits for its turn")]
    leaving = [s for s in members if s.leaving_since is not None or s.rolls_to]
    # One that was away meanwhile was rolled for serving nobody, and may answer again: it goes in its turn.
    due = [s for s in leaving if not s.in_place and _has_left(s, view, now)]
    # Counted again: one whose node was away while its sessions left may be back, and others may be gone.
    standing_by = [s for s in due if not (s.is_ready and s.serves)]
    going = sum(s.is_ready and s.serves and s.in_place for s in view.seats)
    may_go = max(0, view.unavailable - missing - going)
    due = standing_by + [s for s in due if s.is_ready and s.serves][:may_go]
    # What is missing by whatever cause counts: a rollout takes nobody away while others are missing.
    room = view.unavailable - missing - sum(s.is_ready and s.serves for s in leaving)
    actions: list[Action] = []
    if due:
        why = f"make way for {direction.name}, which starts in their place"
        actions.append(Roll(_ids(due), direction.target, in_place=True, why=why))
    begun = {s.replica_id for s in leaving}
    spare = [s for s in members if s.replica_id not in begun]
    standbys = [s for s in spare if not s.serves][:1]
    chosen = [s for s in spare if s.serves][: max(0, room)] or (standbys if not leaving else [])
    actions += _leave(chosen, view, direction)
    if actions:
        return actions
    if leaving:
        return [Wait(f"sessions leave {_names(leaving)}")]
    told = f"{missing} of {view.wanted} replicas are missing, {view.unavailable} may be"
    absent = view.absent()
    return [Wait(f"{told}: {absent}" if absent else told)]


def _leave(seats: Sequence[Seat], view: RolloutView, direction: Direction) -> list[Action]:
    if not seats:
        return []
    going = set(_ids(seats))
    targets = tuple(
        s.replica_id
        for s in view.kept(direction.target)
        if s.is_ready and s.serves and s.replica_id not in going and s.leaving_since is None
    )
    return [Leave(_ids(seats), targets, f"the deployment moves to {direction.name}")]


def _has_left(seat: Seat, view: RolloutView, now: datetime) -> bool:
    """Whether its sessions are gone, or have had their time."""
    if seat.leaving_since is None:
        return False
    patience = timedelta(seconds=view.policy.sessions_wait_seconds)
    return not seat.sessions_left or now - seat.leaving_since >= patience


def _waiting(begun: Sequence[Seat], successors: dict[str, Seat], direction: Direction) -> str:
    starting = [successors[s.replica_id] for s in begun if s.replica_id in successors]
    unready = [f"{s.name} {s.state}" for s in starting if not s.is_ready]
    if unready:
        return f"{', '.join(unready[:3])}{' and others' if unready[3:] else ''}"
    alone = [s for s in begun if s.replica_id not in successors]
    if alone:
        return f"no replica has been made yet to take the place of {_names(alone)}"
    if begun:
        return f"sessions leave {_names(begun)}"
    return f"what was let go has not ended yet, and holds the room that {direction.name} needs"


def _ids(seats: Sequence[Seat]) -> tuple[str, ...]:
    return tuple(seat.replica_id for seat in seats)


def _names(seats: Sequence[Seat], most: int = 3) -> str:
    more = f" and {len(seats) - most} more" if len(seats) > most else ""
    return ", ".join(seat.name for seat in seats[:most]) + more
