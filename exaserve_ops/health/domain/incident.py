"""Incidents: what the guard will not decide alone, held open until the world or a person decides it."""

from __future__ import annotations

from exaserve_ops.lib.lifecycle import Lifecycle, table

OPEN = "open"
RESOLVED = "resolved"
CONFIRMED = "confirmed"
DISMISSED = "dismissed"

MASS_SILENCE = "mass_silence"
OBSERVER_AWAY = "observer_away"
NO_LEADER = "no_leader"

KINDS = {
    MASS_SILENCE: "Too many nodes fell silent at once",
    OBSERVER_AWAY: "Reports could not be read",
    NO_LEADER: "No controller led",
}
"""Kind and what it says in a headline."""

INCIDENT = Lifecycle(
    name="incident",
    initial=OPEN,
    statuses=(OPEN, RESOLVED, CONFIRMED, DISMISSED),
    final=frozenset({RESOLVED, CONFIRMED, DISMISSED}),
    transitions=table(
        [
            ("resolve", [OPEN], RESOLVED),
            ("confirm", [OPEN], CONFIRMED),
            ("dismiss", [OPEN], DISMISSED),
        ]
    ),
    meanings={
        OPEN: "The observer is suspected: silent nodes stay suspect and healing is frozen.",
        RESOLVED: "Reports came back; nodes that are silent since are judged as always.",
        CONFIRMED: "The nodes are really dead: they count as such and are healed.",
        DISMISSED: "The nodes are not to be judged: they stay suspect until they report; healing goes on.",
    },
)
