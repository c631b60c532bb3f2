"""What lies in which slot of a lower tier: bounded bookkeeping, without the memory itself."""

from __future__ import annotations

from dataclasses import dataclass

from workers.kv.tiers.heat import EvictionOrder, Heat


@dataclass(frozen=True, slots=True)
class Place:
    """Where content lies."""

    slot: int
    generation: int
    """Of the slot: raised each time that it gets other content."""


class SlotIndex:
    """Content by digest in a fixed number of slots; full, it gives up the coldest."""

    def __init__(self, capacity: int, heat: Heat) -> None:
        """Begin with `capacity` free slots."""
        self.capacity = capacity
        self._heat = heat
        self._free = list(range(capacity - 1, -1, -1))
        self._generations = [0] * capacity
        self._places: dict[bytes, Place] = {}
        self._order: EvictionOrder[bytes] = EvictionOrder()
        heat.watch(self)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, digest: object) -> bool:
        return digest in self._places

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def find(self, digest: bytes) -> Place | None:
        """Where content lies; `None` if it is not here."""
        return self._places.get(digest)

    def touch(self, digest: bytes) -> None:
        """Note that content was used; unknown content is ignored."""
        if digest in self._places:
            self._file(digest)

    def next_victim(self) -> bytes | None:
        """Whose place `put` would take now; `None` while there are free slots, or no slots at all."""
        return None if self._free else next(iter(self._order), None)

    def put(self, digest: bytes) -> Place | None:
        """Give content a slot, the coldest one's if need be; `None` where there are no slots at all."""
        if digest in self._places:
            self._file(digest)
            return self._places[digest]
        victim = self.next_victim()
        if victim is not None:
            self.drop(victim)
        if not self._free:
            return None
        slot = self._free.pop()
        self._generations[slot] += 1
        self._places[digest] = Place(slot, self._generations[slot])
        self._file(digest)
        return self._places[digest]

    def drop(self, digest: bytes) -> None:
        """Forget content; its slot is free. Unknown content is ignored."""
        place = self._places.pop(digest, None)
        if place is not None:
            self._order.remove(digest)
            self._free.append(place.slot)

    def clear(self) -> None:
        """Forget everything."""
        for digest in list(self._places):
            self.drop(digest)

    def close(self) -> None:
        """Forget everything, and have no slots any more."""
        self.clear()
        self._free = []
        self.capacity = 0

    def coldest(self, count: int) -> list[bytes]:
        """The `count` that would go first."""
        return self._order.coldest(count)

    def refile(self, digest: bytes, *, coldest: bool) -> None:
        """Follow a change of heat."""
        if digest in self._places:
            self._order.refile(digest, hot=self._heat.is_hot(digest), coldest=coldest)

    def age(self) -> None:
        """Follow the halving of uses."""
        self._order.age()

    def _file(self, digest: bytes) -> None:
        self._order.add(digest, hot=self._heat.is_hot(digest), uses=self._heat.uses(digest))
