"""Emptying a node for maintenance: asked for by a person, finished by what runs there."""

from __future__ import annotations

from exaserve_ops.lib.lifecycle import Lifecycle, table

NOT_DRAINED = "none"
DRAINING = "draining"
DRAINED = "drained"

NODE_DRAIN = Lifecycle(
    name="node drain",
    initial=NOT_DRAINED,
    statuses=(NOT_DRAINED, DRAINING, DRAINED),
    final=frozenset(),
    transitions=table(
        [
            ("drain", [NOT_DRAINED], DRAINING),
            ("emptied", [DRAINING], DRAINED),
            # Something turned up that was not known to be there: a node that came back, say.
            ("found_more", [DRAINED], DRAINING),
            ("undrain", [DRAINING, DRAINED], NOT_DRAINED),
        ]
    ),
    meanings={
        NOT_DRAINED: "In normal use.",
        DRAINING: "Cordoned; its replicas are replaced elsewhere, then let go.",
        DRAINED: "Empty: safe to switch off, upgrade or take away.",
    },
)
