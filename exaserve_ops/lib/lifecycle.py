"""A lifecycle is a frozen table (status, event) -> status.

Django's choices, the CHECK constraint, the diagram in the docs, the legend on the screen and the
property tests all come from the one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class IllegalTransitionError(Exception):
    """The event does not apply in this status."""

    def __init__(self, lifecycle: str, status: str, event: str) -> None:
        super().__init__(f"{lifecycle}: '{event}' does not apply to '{status}'")
        self.status = status
        self.event = event


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Statuses of one kind of object and the events that move it."""

    name: str
    initial: str
    statuses: tuple[str, ...]
    """In the order in which people meet them."""
    final: frozenset[str]
    transitions: Mapping[tuple[str, str], str]
    meanings: Mapping[str, str]
    """One sentence a status, for legends and docs."""

    def next(self, status: str, event: str) -> str:
        """Return the status after an event. Raises `IllegalTransitionError`."""
        try:
            return self.transitions[status, event]
        except KeyError:
            raise IllegalTransitionError(self.name, status, event) from None

    def allows(self, status: str, event: str) -> bool:
        """Whether the event applies in this status."""
        return (status, event) in self.transitions

    @property
    def choices(self) -> list[tuple[str, str]]:
        """Pairs for a Django field."""
        return [(status, status.replace("_", " ")) for status in self.statuses]

    @property
    def live(self) -> tuple[str, ...]:
        """Statuses that are not final."""
        return tuple(status for status in self.statuses if status not in self.final)

    def mermaid(self) -> str:
        """The state diagram, as Mermaid text; parallel events share one arrow."""
        arrows: dict[tuple[str, str], list[str]] = {}
        for (status, event), target in self.transitions.items():
            arrows.setdefault((status, target), []).append(event)
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial}"]
        lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
        lines += [f"    {status} --> [*]" for status in self.statuses if status in self.final]
        return "\n".join(lines)


def table(rows: Iterable[tuple[str, Iterable[str], str]]) -> dict[tuple[str, str], str]:
    """Expand rows (event, from statuses, to status) into a transition table.

    Raises `ValueError` when two rows say different things of the same pair.
    """
    transitions: dict[tuple[str, str], str] = {}
    for event, sources, target in rows:
        for source in sources:
            if transitions.setdefault((source, event), target) != target:
                raise ValueError(f"two targets for ({source}, {event})")
    return transitions
