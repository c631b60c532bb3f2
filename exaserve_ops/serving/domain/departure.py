"""How the conversations of a replica are to leave it, while it still serves them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Departure:
    """What was asked for; kept with the replica until it is withdrawn or the replica ends."""

    why: str
    targets: tuple[str, ...] = ()
    """Ids of the replicas that may have them; empty: any of the deployment that takes conversations."""
    moves: bool = True
    """False: each stays until it ends by itself, or until the replica drains."""

    def to_json(self) -> dict[str, Any]:
        """Give what the record keeps."""
        return {**asdict(self), "targets": list(self.targets)}


def read_departure(kept: Mapping[str, Any] | None) -> Departure | None:
    """Read what the record keeps; `None` where the replica's conversations are to stay."""
    if not kept:
        return None
    return Departure(
        why=str(kept.get("why", "")),
        targets=tuple(map(str, kept.get("targets", ()))),
        moves=bool(kept.get("moves", True)),
    )
