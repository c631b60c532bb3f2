"""Where sessions lived a moment ago, by the session table's own word."""

from __future__ import annotations

from exaserve_ops.adapters.session_table import SessionEntry

_SPAN_SECONDS = 30.0
_MOST_IN_A_SPAN = 16_384
"""About 7 MB in all."""

_Session = tuple[str, str]


class RecentOwners:
    """Entries of the last half to whole minute, by model and session; fewer where there are very many.

    Two generations: the young one takes what is new, and in time, or when it is full, replaces the old one.
    So nothing is stamped, sorted or dropped one by one.
    """

    def __init__(self, *, most: int = _MOST_IN_A_SPAN) -> None:
        self._most = most
        self._young: dict[_Session, SessionEntry] = {}
        self._old: dict[_Session, SessionEntry] = {}
        self._young_until_seconds = 0.0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, model: str, session_id: str, now: float) -> SessionEntry | None:
        """What the table said of a session of late."""
        if now >= self._young_until_seconds:
            self._age(now)
        session = (model, session_id)
        return self._young.get(session) or self._old.get(session)

    def note(self, model: str, session_id: str, entry: SessionEntry, now: float) -> None:
        """Remember what the table just said."""
        if now >= self._young_until_seconds:
            self._age(now)
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
        self._young[model, session_id] = entry

    def _age(self, now: float) -> None:
        next_until = self._young_until_seconds + _SPAN_SECONDS
        is_recent = now < next_until
        self._old, self._young = self._young if is_recent else {}, {}
        self._young_until_seconds = next_until if is_recent else now + _SPAN_SECONDS
