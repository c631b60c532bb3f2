"""Which node writes a replica's log: a replica over several nodes has one for each member."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.gang_rules import HEAD
from exaserve_ops.serving.models import Replica, ReplicaMember
from exaserve_ops.serving.selectors.members import ONE_NODE, members_problem_of

LOG_HINT = "log"
_MOST_DIGITS = 4


@dataclass(frozen=True, slots=True)
class LogSource:
    """One log of a replica, and the node that has it."""

    replica_id: UUID
    number: int
    """Of the member; 0 where one node runs the whole."""
    node_id: UUID | None
    """`None`: it has no place yet."""
    node_name: str = ""
    problem: str = ""
    """Why its node's agent cannot send it, and what to do; empty where it can."""

    @property
    def key(self) -> str:
        """What asks for it: `<replica>/<member>`."""
        return f"{self.replica_id}/{self.number}"


def find_log(replica_id: UUID, member: str = "") -> LogSource | None:
    """The log of a member by its number, as somebody wrote it; nothing written: the head's, or the only one.

    `None` where there is no such replica. Raises `InvalidInputError` for a member that it does not have.
    """
    replica = Replica.objects.select_related("node").filter(pk=replica_id).first()
    if replica is None:
        return None
    members = list(replica.members.select_related("node").order_by("number"))
    number = _number(member, max(1, len(members)), is_one_node=replica.node_count == 1)
    if not members:
        return LogSource(replica_id, 0, replica.node_id, replica.node.name if replica.node else "")
    node = members[number].node
    problem = members_problem_of(node)
    told = f"{node.name} cannot show it: {problem}" if problem else ""
    return LogSource(replica_id, number, node.pk, node.name, told)


def ending_of(replica: Replica, source: LogSource) -> Replica | ReplicaMember:
    """Who knows how a log's writer ended last: the head's end is told of the replica itself."""
    if source.number == HEAD:
        return replica
    return replica.members.get(number=source.number)


def find_log_by_key(key: str) -> LogSource | None:
    """The log of a `LogSource.key`; `None` where there is none any more."""
    replica_id, _, number = key.partition("/")
    try:
        return find_log(UUID(replica_id), number)
    except (ValueError, InvalidInputError):
        return None


def log_number(replica_id: UUID, node_id: UUID) -> int | None:
    """Of which member the lines are that a node sends; 0: of the whole. `None`: nothing of it runs there."""
    member = ReplicaMember.objects.filter(replica=replica_id, node=node_id)
    number = member.values_list("number", flat=True).first()
    if number is not None:
        return number
    return 0 if Replica.objects.filter(ONE_NODE, pk=replica_id, node=node_id).exists() else None


def _number(member: str, count: int, *, is_one_node: bool) -> int:
    if not member:
        return 0
    if member.isascii() and member.isdigit() and len(member) <= _MOST_DIGITS and int(member) < count:
        return int(member)
    if is_one_node:
        has = "it runs on one node, as member 0"
    else:
        has = f"it has members 0 to {count - 1}" if count > 1 else "its members have no places yet"
    raise InvalidInputError("member", f"{has}: there is no member '{member[:20]}'")
