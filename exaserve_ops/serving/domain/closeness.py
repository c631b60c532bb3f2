"""Which accelerators of a node belong together, and which network adapter belongs to each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

UNKNOWN_WAY = 1_000
"""For comparing: longer than every way that a tool tells of. What is not known is never preferred."""


@dataclass(frozen=True, slots=True)
class Closeness:
    """How near accelerators and network adapters of one node are to one another, as its agent found it."""

    ways: Mapping[frozenset[str], int] = field(default_factory=dict)
    """By two UUIDs, or a UUID and an adapter's device name: a smaller number is a shorter way.

    The numbers are those of `nvidia-smi topo -m`, in its order: NVLink, one PCIe switch, several, one
    CPU's root, another root of that NUMA node, another NUMA node.
    """
    adapters: tuple[str, ...] = ()
    """Device names, such as `mlx5_0`."""

    def way(self, one: str, other: str) -> int:
        """How far it is between two of them."""
        return self.ways.get(frozenset((one, other)), UNKNOWN_WAY)

    def length(self, uuids: Iterable[str]) -> tuple[int, int]:
        """The longest way between any two of these accelerators, and the sum of all ways."""
        ways = [self.way(one, other) for one, other in combinations(uuids, 2)]
        return max(ways, default=0), sum(ways)

    def choose(self, uuids: Sequence[str], count: int) -> tuple[str, ...]:
        """Return `count` of the accelerators that lie together best, in the order in which they were given.

        Of equal choices the one that leaves whole islands to others, then the first one given. From each
        accelerator the nearest are gathered; in islands, where all ways are alike, that finds the best.
        Raises `ValueError` where there are fewer than `count`.
        """
        if len(uuids) < count:
            raise ValueError(f"{count} of {len(uuids)} accelerators cannot be chosen")
        place = {uuid: index for index, uuid in enumerate(uuids)}
        if not self.ways or count == len(uuids):
            return tuple(uuids[:count])
        found = {self._gather(seed, uuids, count, place) for seed in uuids}
        return min(
            found,
            key=lambda chosen: (*self.length(chosen), self._split(chosen, uuids), _places(chosen, place)),
        )

    def adapters_of(self, uuids: Sequence[str]) -> tuple[str, ...]:
        """Return the nearest adapter of each accelerator, an empty name where none is known.

        Accelerators that are as near to several get different ones: each has a line of its own.
        """
        taken: dict[str, int] = {}
        chosen: list[str] = []
        for uuid in uuids:
            known = [name for name in self.adapters if self.way(uuid, name) < UNKNOWN_WAY]
            if not known:
                chosen.append("")
                continue
            name = min(known, key=lambda name: (self.way(uuid, name), taken.get(name, 0), name))
            taken[name] = taken.get(name, 0) + 1
            chosen.append(name)
        return tuple(chosen)

    def _gather(
        self, seed: str, uuids: Sequence[str], count: int, place: Mapping[str, int]
    ) -> tuple[str, ...]:
        chosen = [seed]
        left = [uuid for uuid in uuids if uuid != seed]
        while len(chosen) < count:
            nearest = min(left, key=lambda uuid: (sum(self.way(uuid, one) for one in chosen), place[uuid]))
            chosen.append(nearest)
            left.remove(nearest)
        return tuple(sorted(chosen, key=place.__getitem__))

    def _split(self, chosen: Sequence[str], uuids: Sequence[str]) -> int:
        """How many accelerators that are left would lose a neighbour as near as those chosen are."""
        longest, _ = self.length(chosen)
        left = [uuid for uuid in uuids if uuid not in chosen]
        return sum(any(self.way(uuid, one) <= longest for one in chosen) for uuid in left)


def _places(chosen: Sequence[str], place: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(place[uuid] for uuid in chosen)


UNKNOWN = Closeness()
"""Of a node whose tools do not tell."""
