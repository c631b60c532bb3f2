"""A replica that says nothing: slow, or gone? What follows for the request that waits for it. Pure.

A host that lost its power neither refuses nor answers, and a request on its way there would wait for
as long as a slow answer may take. So a gateway goes by what the control plane knows of the node.
"""

from __future__ import annotations

from dataclasses import dataclass

MOVE_AFTER_SECONDS = 1.0
"""A suspect node may be well: a request that was sent just now gets its chance."""
OVER_AFTER_SECONDS = 5.0
"""An answer that has begun may outlive its replica's place in the table, as long as more of it comes."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Since when nothing came, and what is known of who should speak."""

    seconds: float
    withdrawn: bool
    """The route table has the replica no more, or has it elsewhere."""
    suspect: bool
    """Its node misses signs of life."""


def why_elsewhere(silence: Silence) -> str:
    """Why a request without a byte of an answer goes to another replica; empty where it waits on."""
    if silence.withdrawn:
        return "silent, and no longer in the route table"
    if silence.suspect and silence.seconds >= MOVE_AFTER_SECONDS:
        return "silent, and its node is suspect"
    return ""


def why_over(silence: Silence) -> str:
    """Why the rest of an answer that has begun is not waited for; empty where it is."""
    if silence.withdrawn and silence.seconds >= OVER_AFTER_SECONDS:
        return "silent, and no longer in the route table"
    return ""
