"""A holder's copies of weights: who fills, who waits, who uses, and when they go. Pure but for `memory`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from workers.kv.holder_wire import HeldWeights
from workers.kv.memory import Piece, SharedMemory

log = logging.getLogger(__name__)

User = Hashable
"""Whoever is at the other end of a connection."""


@dataclass(slots=True, eq=False)
class _Copy:
    name: str
    piece: Piece
    filler: User | None
    """Who writes it; `None`: it is whole."""
    checksum: str = ""
    users: set[User] = field(default_factory=set)
    waiting: list[User] = field(default_factory=list)
    unused_since: float | None = None


@dataclass(frozen=True, slots=True)
class Handover:
    """A user is to be given a copy now: to fill it, or to use it."""

    user: User
    piece: Piece | None
    """`None`: there is no memory for it any more."""
    checksum: str
    """Empty: it is to be filled."""


class WeightsRefusedError(Exception):
    """It cannot be done; the text says why."""


class WeightsShelf:
    """Copies by name. One user fills a copy, the others wait; the last user's end frees it after a while."""

    def __init__(
        self, memory: SharedMemory, new_piece: Callable[[int], Piece], *, linger_seconds: float
    ) -> None:
        """`new_piece` returns wiped memory. `linger_seconds` is how long a copy outlives its last user."""
        self._memory = memory
        self._new_piece = new_piece
        self._linger_seconds = linger_seconds
        self._copies: dict[str, _Copy] = {}
        self._rejected: list[_Copy] = []

    def __len__(self) -> int:
        return len(self._copies) + len(self._rejected)

    def status(self) -> tuple[HeldWeights, ...]:
        """Return what is held."""
        return tuple(
            HeldWeights(
                copy.name,
                copy.piece.size_bytes,
                "ready" if copy.filler is None else "fill",
                len(copy.users) + (copy.filler is not None),
            )
            for copy in (*self._copies.values(), *self._rejected)
        )

    def open(self, user: User, name: str, size_bytes: int) -> Handover | None:
        """Let a user have a copy; `None`: it has to wait. Raises `WeightsRefusedError`, `OSError`."""
        copy = self._copies.get(name)
        if copy is None:
            copy = _Copy(name, self._new_piece(size_bytes), filler=user)
            self._copies[name] = copy
            return Handover(user, copy.piece, "")
        if copy.piece.size_bytes != size_bytes:
            raise WeightsRefusedError(
                f"weights of this name have {copy.piece.size_bytes} bytes here, not {size_bytes}"
            )
        if copy.filler is not None:
            copy.waiting.append(user)
            return None
        return self._hand_over(copy, user)

    def seal(self, user: User, name: str, checksum: str) -> list[Handover]:
        """Take a filled copy; those that waited get it. Raises `WeightsRefusedError`, `OSError`."""
        copy = self._copies.get(name)
        if copy is None or copy.filler != user:
            raise WeightsRefusedError("only who fills weights can seal them")
        if not checksum:
            raise WeightsRefusedError("weights are sealed with a checksum")
        self._memory.seal(copy.piece)
        copy.filler, copy.checksum = None, checksum
        copy.users.add(user)
        waiting, copy.waiting = copy.waiting, []
        log.info("weights %s are whole: %d bytes", name, copy.piece.size_bytes)
        return [self._hand_over(copy, other) for other in waiting]

    def reject(self, user: User, name: str) -> None:
        """Give a copy to nobody any more; who uses it keeps it."""
        copy = self._copies.get(name)
        if copy is None or user not in copy.users:
            raise WeightsRefusedError("only who uses weights can reject them")
        log.error("weights %s are not what was sealed: a user rejected them", name)
        copy.users.discard(user)
        del self._copies[name]
        self._rejected.append(copy)

    def leave(self, user: User, *, now: float) -> list[Handover]:
        """Forget a user; returns who is to fill a copy in its place."""
        handovers = []
        for copy in (*self._copies.values(), *self._rejected):
            if user in copy.waiting:
                copy.waiting.remove(user)
            if user in copy.users:
                copy.users.remove(user)
            if copy.filler == user:
                handovers += self._without_filler(copy)
            if copy.filler is None and not copy.users:
                copy.unused_since = now
        return handovers

    def tend(self, *, now: float) -> None:
        """Free what has not been used for long enough."""
        self._drop(
            copy
            for copy in self._unused()
            if copy in self._rejected or now - (copy.unused_since or now) >= self._linger_seconds
        )

    def make_room(self) -> bool:
        """Free all that nobody uses; true if that was anything."""
        return self._drop(self._unused())

    def _unused(self) -> list[_Copy]:
        copies = (*self._copies.values(), *self._rejected)
        return [copy for copy in copies if copy.filler is None and not copy.users]

    def _hand_over(self, copy: _Copy, user: User) -> Handover:
        copy.users.add(user)
        copy.unused_since = None
        return Handover(user, copy.piece, copy.checksum)

    def _without_filler(self, copy: _Copy) -> list[Handover]:
        """The filler died: nobody knows how much of it is there, so the next one starts anew."""
        log.warning("who filled weights %s has gone before they were whole", copy.name)
        self._memory.release(copy.piece)
        del self._copies[copy.name]
        if not copy.waiting:
            return []
        filler, *waiting = copy.waiting
        try:
            piece = self._new_piece(copy.piece.size_bytes)
        except OSError:
            log.exception("no memory for weights %s", copy.name)
            return [Handover(user, None, "") for user in copy.waiting]
        self._copies[copy.name] = _Copy(copy.name, piece, filler=filler, waiting=waiting)
        return [Handover(filler, piece, "")]

    def _drop(self, copies: Iterable[_Copy]) -> bool:
        dropped = list(copies)
        for copy in dropped:
            log.info("weights %s are freed: nobody uses them", copy.name)
            self._memory.release(copy.piece)
            if copy in self._rejected:
                self._rejected.remove(copy)
            else:
                del self._copies[copy.name]
        return bool(dropped)
