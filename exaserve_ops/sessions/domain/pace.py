"""How much moves at once, and how fast. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from exaserve_ops.sessions.domain.relocation import Budget

_BURST_SECONDS = 2.0
"""What was not used for so long may be used at once."""


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """What an installation allows; the environment sets it."""

    moves_per_node: int = 2
    """At once, as source or target."""
    moves_per_fleet: int = 32
    bytes_per_second: int = 256 << 20
    """Of one move."""
    fleet_bytes_per_second: int = 4 << 30
    """Of all moves that begin, on average."""

    @property
    def burst_bytes(self) -> int:
        """What may begin at once after a rest."""
        return int(self.fleet_bytes_per_second * _BURST_SECONDS)

    @property
    def rested(self) -> Budget:
        """Budget of a plan while nothing has moved lately."""
        return Budget(self.moves_per_node, self.moves_per_fleet, self.burst_bytes, self.burst_bytes)


class BytePace:
    """Counts what has begun against the fleet's bytes a second. Times are seconds of one clock."""

    def __init__(self, limits: MoveLimits, now_seconds: float) -> None:
        """Begin rested: another leader's bytes are not known, and a burst is harmless."""
        self._limits = limits
        self._left = float(limits.burst_bytes)
        self._counted_seconds = now_seconds

    def budget(self, now_seconds: float) -> Budget:
        """What may begin now."""
        limits = self._limits
        grown = self._left + limits.fleet_bytes_per_second * max(0.0, now_seconds - self._counted_seconds)
        self._left = min(float(limits.burst_bytes), grown)
        self._counted_seconds = now_seconds
        return Budget(limits.moves_per_node, limits.moves_per_fleet, int(self._left), limits.burst_bytes)

    def take(self, kv_bytes: int) -> None:
        """Count a move that began; one that is larger than what is left is waited for afterwards."""
        self._left -= kv_bytes
