"""Where a replica that spans nodes goes: all its ranks inside one fast fabric, or nowhere. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from exaserve_ops.serving.domain.closeness import UNKNOWN, Closeness
from exaserve_ops.serving.domain.fitting import find_room
from exaserve_ops.serving.domain.rooms import NodeRoom, PlacementRequest

MEMBERS_SINCE_MINOR = 7
"""Of the agents' protocol; an agent that is older would run its part as a replica of its own."""

_FABRIC_UNKNOWN = "its supernode is not known: label it `supernode`"


@dataclass(frozen=True, slots=True)
class Seat:
    """A node that may take one member of a gang."""

    room: NodeRoom
    supernode: str
    """The group of nodes with a fast fabric that it belongs to; empty where none is known."""
    closeness: Closeness = UNKNOWN


@dataclass(frozen=True, slots=True)
class Member:
    """What of a gang runs on one node: as many ranks as it has accelerators."""

    number: int
    """The node's rank, from 0: the first has the rendezvous and answers HTTP."""
    node_id: str
    node_name: str
    accelerator_uuids: tuple[str, ...]
    adapters: tuple[str, ...]
    """The network adapter next to each accelerator; an empty name where none is known."""
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Gang:
    """Places for all members, and why there."""

    supernode: str
    members: tuple[Member, ...]
    why: str


@dataclass(frozen=True, slots=True)
class GangRefusal:
    """No supernode will do; one reason a supernode."""

    reasons: tuple[tuple[str, str], ...]

    def summary(self, *, limit: int = 4) -> str:
        """One line for people."""
        if not self.reasons:
            return "no nodes have joined"
        told = "; ".join(reason for _, reason in self.reasons[:limit])
        more = len(self.reasons) - limit
        return f"{told}; and {more} more supernodes" if more > 0 else told


@dataclass(frozen=True, slots=True)
class _Choice:
    """Nodes of one supernode that would do."""

    supernode: str
    rooms: tuple[_Room, ...]
    left: int
    """Nodes with room for a member that are not taken."""
    beside: int
    """Members of the same deployment in that supernode."""

    @property
    def racks(self) -> int:
        return len({room.seat.room.domain for room in self.rooms})

    def cost(self, request: PlacementRequest) -> tuple[int | str, ...]:
        """Lower is better.

        A switch crossed costs every token, so it comes before spreading; that one supernode is lost costs
        a deployment once. A supernode that is just large enough is taken before one that is left in pieces.
        """
        rooms = [room.seat.room for room in self.rooms]
        shunned = sum(room.node_id in request.shun for room in rooms)
        fetches = sum(request.lacks_weights(room.node_id) for room in rooms)
        return (shunned, self.racks, self.beside, fetches, self.left, self.supernode)


@dataclass(frozen=True, slots=True)
class _Room:
    """A seat with room for a member, and the accelerators that it would have."""

    seat: Seat
    uuids: tuple[str, ...]
    reserved_bytes: int
    spare: int
    """Accelerators that would fit, too, and stay free."""


def plan_gang(request: PlacementRequest, nodes: int, seats: Sequence[Seat]) -> Gang | GangRefusal:
    """Place a replica over `nodes` nodes, each with the request's accelerators and memory.

    `request.memory_bytes` and `request.accelerators` are of one member. All members are on nodes of their
    own in one supernode, in as few racks as there can be, ordered by rack, so that neighbours in a pipeline
    are neighbours in the fabric; in a node the accelerators that lie together best. Deterministic. Raises
    `ValueError` for less than two nodes: what fits on one is placed by `choose_placement`.
    """
    if nodes < 2:  # noqa: PLR2004 - that is what spanning means
        raise ValueError("a gang has two members or more")
    choices: list[_Choice] = []
    refused: list[tuple[str, str]] = []
    for supernode, group in _by_supernode(seats).items():
        rooms, reasons = _rooms(request, group)
        if not supernode:
            refused.append((supernode, _without_fabric(group, reasons)))
        elif len(rooms) < nodes:
            refused.append((supernode, _too_few(supernode, nodes, len(rooms), reasons)))
        else:
            chosen = _nearest(rooms, nodes, request)
            beside = sum(seat.room.same_deployment + seat.room.same_standby for seat in group)
            choices.append(_Choice(supernode, chosen, len(rooms) - nodes, beside))
    if not choices:
        return GangRefusal(tuple(sorted(refused)))
    best = min(choices, key=lambda choice: choice.cost(request))
    return Gang(best.supernode, _members(best.rooms), _why(best, len(choices)))


def _by_supernode(seats: Iterable[Seat]) -> dict[str, list[Seat]]:
    groups: dict[str, list[Seat]] = {}
    for seat in sorted(seats, key=lambda seat: (seat.supernode, seat.room.name)):
        groups.setdefault(seat.supernode, []).append(seat)
    return groups


def _rooms(request: PlacementRequest, group: Iterable[Seat]) -> tuple[list[_Room], Counter[str]]:
    """Seats with room for a member; why the others have none, counted."""
    rooms: list[_Room] = []
    reasons: Counter[str] = Counter()
    for seat in group:
        fitting = seat.room.members_problem or find_room(request, seat.room)
        if isinstance(fitting, str):
            reasons[fitting] += 1
            continue
        uuids = seat.closeness.choose([a.uuid for a in fitting], request.accelerators)
        reserved = sum(a.cost_bytes(request) for a in fitting if a.uuid in uuids)
        rooms.append(_Room(seat, uuids, reserved, len(fitting) - request.accelerators))
    return rooms, reasons


def _nearest(rooms: Sequence[_Room], nodes: int, request: PlacementRequest) -> tuple[_Room, ...]:
    """Choose members in as few racks as there can be, of each rack the nodes that suit best.

    The largest racks first need the fewest; the last one is the smallest that has room for the rest, so
    that larger ones stay whole. What is to be shunned is taken only where the others are too few.
    """
    good = [room for room in rooms if room.seat.room.node_id not in request.shun]
    usable = good if len(good) >= nodes else rooms
    racks: dict[str, list[_Room]] = {}
    for room in usable:
        racks.setdefault(room.seat.room.domain, []).append(room)
    for members in racks.values():
        members.sort(key=lambda room: _suits(room, request))
    chosen: list[_Room] = []
    while (missing := nodes - len(chosen)) > 0:
        enough = [name for name, members in racks.items() if len(members) >= missing]
        name = (
            min(enough, key=lambda name: (len(racks[name]), name))
            if enough
            else min(racks, key=lambda name: (-len(racks[name]), name))
        )
        chosen += racks.pop(name)[:missing]
    return tuple(sorted(chosen, key=lambda room: (room.seat.room.domain, room.seat.room.name)))


def _suits(room: _Room, request: PlacementRequest) -> tuple[int | str, ...]:
    """Which node of a rack first: weights are there, the cards lie together, little is left over."""
    node = room.seat.room
    fetches = int(request.lacks_weights(node.node_id))
    shunned = int(node.node_id in request.shun)
    return (shunned, fetches, *room.seat.closeness.length(room.uuids), room.spare, node.name)


def _members(rooms: Sequence[_Room]) -> tuple[Member, ...]:
    return tuple(
        Member(
            number,
            room.seat.room.node_id,
            room.seat.room.name,
            room.uuids,
            room.seat.closeness.adapters_of(room.uuids),
            room.reserved_bytes,
        )
        for number, room in enumerate(rooms)
    )


def _why(choice: _Choice, supernodes: int) -> str:
    known = all(room.seat.room.rack for room in choice.rooms)
    racks = "one rack" if choice.racks == 1 else f"{choice.racks} racks, the fewest there"
    where = f"{racks} of supernode" if known else "racks that are not known of supernode"
    others = "" if supernodes == 1 else f", the best of {supernodes} supernodes with room"
    return f"all {len(choice.rooms)} nodes in {where} {choice.supernode}{others}"


def _too_few(supernode: str, nodes: int, free: int, reasons: Counter[str]) -> str:
    told = f"{free} of {nodes} nodes free in supernode {supernode}"
    return f"{told} ({_counted(reasons)})" if reasons else f"{told}, which has no more"


def _without_fabric(group: Sequence[Seat], reasons: Counter[str]) -> str:
    usable = len(group) - reasons.total()
    count = f"{usable} nodes" if usable != 1 else "1 node"
    return f"{count} with room of {len(group)} cannot be used: {_FABRIC_UNKNOWN}"


def _counted(reasons: Counter[str], most: int = 2) -> str:
    """The reasons that most give: `2 dead, 1 cordoned: kernel update`."""
    told = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{count}: {reason}" for reason, count in told[:most])
