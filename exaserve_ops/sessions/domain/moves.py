"""A move of a conversation as it is recorded: its lifecycle, and what its parts tell one another."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from exaserve_ops.lib.lifecycle import Lifecycle, table

PLANNED = "planned"
SENDING = "sending"
SWITCHING = "switching"
DONE = "done"
DROPPED = "dropped"
FAILED = "failed"

_LIVE = (PLANNED, SENDING, SWITCHING)

RELOCATION = Lifecycle(
    name="relocation",
    initial=PLANNED,
    statuses=(*_LIVE, DONE, DROPPED, FAILED),
    final=frozenset({DONE, DROPPED, FAILED}),
    transitions=table(
        [
            ("send", [PLANNED], SENDING),
            # Without its KV: the target computes it again.
            ("skip_sending", [PLANNED, SENDING], SWITCHING),
            ("arrived", [SENDING], SWITCHING),
            ("repinned", [SWITCHING], DONE),
            ("drop", _LIVE, DROPPED),
            ("fail", [SENDING], FAILED),
        ]
    ),
    meanings={
        PLANNED: "Waits for its turn.",
        SENDING: "Its KV gets to the target, or the target computes it; it is served where it was.",
        SWITCHING: "The target has what it is to have; the next turn is about to go there.",
        DONE: "Its next turn goes to the target.",
        DROPPED: "It stays where it was, since something came between: a turn, or too long a wait.",
        FAILED: "It stays where it was, since its KV could not be sent.",
    },
)

WITHOUT_KV = frozenset({"session_unknown", "other_shape", "not_found", "status_404", "target_said_404"})
"""What engines say where there is nothing that could be sent, now or later."""
COMPUTED = "computed"
"""Carrier of a move whose target computed the context: nothing but text went there."""
BETWEEN = frozenset({"turn_runs", "already_moving", "refused"})
"""What is no failure, but somebody else's business with the session."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Where the session table has a conversation."""

    owner: str
    """Replica, of those that were asked about; empty: another one."""
    owner_epoch: int
    turns: int
    turn_began_seconds: int = field(default=0, compare=False)
    """When the last turn began, in Unix seconds of Redis."""


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """All that the source's agent and the target's key are found by."""

    relocation_id: str
    session_id: str
    source_node_id: str
    source_id: str
    source_attempt: int
    target_node_id: str
    target_id: str
    target_attempt: int
    target_address: str
    """`host:port`."""
    seconds: float
    """For how long sending may take."""
    bytes_per_second: float
    computes: bool = False
    """Whether the target is to compute the context, and no KV to be sent."""

    @property
    def transfer_id(self) -> bytes:
        """16 bytes; a target takes each only once, and each relocation is sent only once."""
        return uuid.UUID(self.relocation_id).bytes


@dataclass(frozen=True, slots=True)
class Sent:
    """What the source's agent says of its part."""

    code: str = ""
    """Empty: the target has it."""
    reason: str = ""
    sent_bytes: int = 0
    target_tokens: int = 0
    seconds: float = 0.0
    turn_began: bool = False
    carrier: str = ""
    """`shared_memory`, `tcp` or `nixl`; `computed`: the target computed it; empty: not said."""


_KIND = "session-move"


def move_command(relocation_id: str) -> str:
    """Id of the command that orders a relocation's sending."""
    return f"{_KIND}/{relocation_id}"


def is_move_command(text: str) -> bool:
    """Whether a command's id is that of such an order."""
    return text.startswith(f"{_KIND}/")


def parse_move_command(text: str) -> uuid.UUID:
    """The relocation. Raises `ValueError` for any other text."""
    kind, relocation_id = text.split("/")
    if kind != _KIND:
        raise ValueError(f"{text!r} orders no move")
    return uuid.UUID(relocation_id)
