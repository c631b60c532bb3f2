"""Which pieces a node has verified, and news of them for whoever waits."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from workers.weights.swarm.pieces import PieceRow


class PieceBoard:
    """Grows only. All methods may be called from any thread."""

    def __init__(self, row: PieceRow, present: Iterable[int] = ()) -> None:
        self._row = row
        self._here = bytearray(row.count)
        self.have_bytes = 0
        self._order: list[int] = []
        self._news = threading.Condition()
        self._closed = False
        self.add_all(present)

    def add(self, index: int) -> bool:
        """Note a piece and wake who waits. Returns `False` if it was here."""
        with self._news:
            if self._here[index]:
                return False
            self._note(index)
            self._news.notify_all()
            return True

    def add_all(self, indices: Iterable[int]) -> None:
        """Note many pieces."""
        with self._news:
            for index in indices:
                if not self._here[index]:
                    self._note(index)
            self._news.notify_all()

    def _note(self, index: int) -> None:
        self._here[index] = 1
        self._order.append(index)
        self.have_bytes += self._row.piece(index).length

    def has(self, index: int) -> bool:
        """Whether a piece is here."""
        return bool(self._here[index])

    def missing(self, indices: Sequence[int]) -> list[int]:
        """Those of these pieces that are not here."""
        here = self._here
        return [index for index in indices if not here[index]]

    @property
    def have(self) -> int:
        """Number of pieces that are here."""
        return len(self._order)

    @property
    def whole(self) -> bool:
        """Whether all pieces are here."""
        return len(self._order) == self._row.count

    @property
    def closed(self) -> bool:
        """Whether nothing more will come."""
        return self._closed

    def since(self, cursor: int, wait_seconds: float) -> tuple[list[int], int]:
        """Pieces in the order in which they came, from a cursor on, waiting for the first one.

        Returns them and the next cursor; nothing if none came in time or the board was closed.
        """
        with self._news:
            if cursor >= len(self._order) and not self._closed:
                self._news.wait(wait_seconds)
            return self._order[cursor:], len(self._order)

    def close(self) -> None:
        """Wake everyone; nothing more will come."""
        with self._news:
            self._closed = True
            self._news.notify_all()
