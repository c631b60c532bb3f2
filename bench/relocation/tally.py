"""What came of many moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_MOST_TOLD = 20


@dataclass(slots=True)
class Tally:
    """Counts of one run."""

    moves: int = 0
    """That began, whatever came of them."""
    turns: int = 0
    wrong_turns: int = 0
    """Answers with other tokens than the twin's, which never moved."""
    lost_sessions: int = 0
    """Conversations whose next turn was not answered in time although replicas served."""
    swaps_during_turns: int = 0
    """The session table was swapped while a turn of the session was open."""
    turns_during_moves: int = 0
    retried_turns: int = 0
    """Turns that had to be asked again, since what served them died; the client got one answer."""
    moved_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    carriers: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    death_steps: Counter[str] = field(default_factory=Counter)
    """Of engines, by the step of the move at which each was killed."""
    after_move_tokens: Counter[str] = field(default_factory=Counter)
    """Context tokens of first turns after a move that carried KV: cached at the target, or computed."""
    told: list[str] = field(default_factory=list)
    """What went wrong, for people; the first of it."""

    def tell(self, text: str) -> None:
        """Note something for people."""
        if len(self.told) < _MOST_TOLD:
            self.told.append(text)

    def report(self) -> dict[str, Any]:
        """All of it, for a JSON object."""
        return {
            "moves": self.moves,
            "turns": self.turns,
            "wrong_turns": self.wrong_turns,
            "lost_sessions": self.lost_sessions,
            "swaps_during_turns": self.swaps_during_turns,
            "turns_during_moves": self.turns_during_moves,
            "retried_turns": self.retried_turns,
            "moved_bytes": self.moved_bytes,
            "outcomes": dict(self.outcomes.most_common()),
            "carriers": dict(self.carriers.most_common()),
            "deaths": dict(self.deaths.most_common()),
            "death_steps": dict(sorted(self.death_steps.items())),
            "after_move_tokens": dict(self.after_move_tokens),
            "told": self.told,
        }
