"""How many reports are lost on the way: read off their sequence numbers, old ones forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MEMORY_REPORTS = 120
"""About how many reports a node's figure remembers."""
LONGEST_GAP = 8
"""More missing in a row is silence, and says nothing about loss."""
_PRIOR_REPORTS = 20
"""As if so many had arrived before: one lost report of a new node is not half of all."""


@dataclass(frozen=True, slots=True)
class LossCount:
    """Reports that came and that did not, the older the less."""

    arrived: float = 0.0
    lost: float = 0.0

    @property
    def ratio(self) -> float:
        """Share lost, 0-1."""
        return self.lost / (self.arrived + self.lost + _PRIOR_REPORTS)

    def after(self, previous_sequence: int, sequence: int) -> LossCount:
        """Count one report in. Sequences are those of one run of an agent."""
        missing = sequence - previous_sequence - 1
        if missing < 0:
            return self
        kept = 1 - 1 / MEMORY_REPORTS
        lost = missing if missing <= LONGEST_GAP else 0
        return LossCount(self.arrived * kept + 1, self.lost * kept + lost)


def fleet_loss(counts: Iterable[LossCount]) -> float:
    """Share lost over all nodes, 0-1: one node that knows little learns from the others."""
    arrived = lost = 0.0
    for count in counts:
        arrived += count.arrived
        lost += count.lost
    return lost / (arrived + lost + _PRIOR_REPORTS)
