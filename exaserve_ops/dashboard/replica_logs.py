"""Which log of a replica a page shows: a replica over several nodes has one for each member."""

from __future__ import annotations

from dataclasses import dataclass, field

from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.engine_launch import TORCH
from exaserve_ops.serving.models import Replica, ReplicaMember
from exaserve_ops.serving.selectors.logs import ending_of, find_log


@dataclass(frozen=True, slots=True)
class ShownLog:
    """A log, what else there is to choose, and how what wrote it ended last."""

    number: int
    ending: Replica | ReplicaMember
    choices: tuple[tuple[int, str], ...] = ()
    """Number and name of each member; none where one node runs the whole."""
    problem: str = ""
    """Why it cannot be shown, and what to do."""
    is_unknown: bool = field(default=False, kw_only=True)
    """No such member was found: this is the head."""

    @property
    def label(self) -> str:
        """Whose it is; empty where there is only one."""
        return dict(self.choices).get(self.number, "")


def shown_log(replica: Replica, members: list[ReplicaMember], asked: str) -> ShownLog:
    """The log of the member that is asked for; of an unknown one the problem, and the head's ending."""
    part = "Stage" if replica.deployment.engine == TORCH else "Member"
    choices = tuple((member.number, f"{part} {member.number} on {member.node.name}") for member in members)
    try:
        source = find_log(replica.pk, asked)
    except InvalidInputError as error:
        return ShownLog(0, replica, choices, error.message, is_unknown=True)
    if source is None:  # it was removed meanwhile
        return ShownLog(0, replica, choices)
    return ShownLog(source.number, ending_of(replica, source), choices, source.problem)
