"""How hot content is, and in which order tiers give theirs up."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, Literal, Protocol, TypeVar

Eviction = Literal["lru", "lfu"]
EVICTIONS: tuple[Eviction, ...] = ("lru", "lfu")

_MOST_USES = 15
"""Beyond it one more use says nothing; it also bounds how long old fame lasts."""
_REMEMBERED_USES = 65_536
"""Digests whose uses are counted; when there are more, all counts are halved."""

Key = TypeVar("Key")


class EvictionOrder(Generic[Key]):
    """Keys from the coldest to the hottest: cold before hot, then fewer uses, then the longest untouched.

    Under LRU all keys are added with the same number of uses. All steps take constant time.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._groups: tuple[dict[int, OrderedDict[Key, None]], ...] = ({}, {})
        """For cold and hot: number of uses to keys, the longest untouched first."""
        self._place: dict[Key, tuple[bool, int]] = {}
        self.hot = 0
        """Keys that are hot."""

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, key: object) -> bool:
        return key in self._place

    def __iter__(self) -> Iterator[Key]:
        """From the coldest on."""
        for groups in self._groups:
            for uses in sorted(groups):
                yield from groups[uses]

    def add(self, key: Key, *, hot: bool = False, uses: int = 0) -> None:
        """File a key as the last touched of its kind; one that is there is filed anew."""
        if key in self._place:
            self.remove(key)
        self._groups[hot].setdefault(uses, OrderedDict())[key] = None
        self._place[key] = (hot, uses)
        self.hot += hot

    def remove(self, key: Key) -> None:
        """Take a key out. Raises `KeyError`."""
        hot, uses = self._place.pop(key)
        group = self._groups[hot][uses]
        del group[key]
        if not group:
            del self._groups[hot][uses]
        self.hot -= hot

    def pop(self) -> Key:
        """Take the coldest key out. Raises `StopIteration` if there is none."""
        key = next(iter(self))
        self.remove(key)
        return key

    def refile(self, key: Key, *, hot: bool, coldest: bool = False) -> None:
        """Make a key hot or cold, as the last touched of its kind or as the first to go of it."""
        was_hot, uses = self._place[key]
        if was_hot == hot:
            return
        self.add(key, hot=hot, uses=uses)
        if coldest:
            self._groups[hot][uses].move_to_end(key, last=False)

    def coldest(self, count: int) -> list[Key]:
        """The first `count` keys, which stay."""
        return list(islice(self, count))

    def age(self) -> None:
        """Halve all uses: what was used often long ago becomes like the rest."""
        for key in list(self):
            hot, uses = self._place[key]
            self.add(key, hot=hot, uses=uses // 2)


class HeatWatcher(Protocol):
    """Somebody who keeps content in the order of its heat."""

    def refile(self, digest: bytes, *, coldest: bool) -> None:
        """Content became hot or cold; `coldest`: it goes before all others of its kind."""
        ...

    def age(self) -> None:
        """All counts of uses were halved."""
        ...


class Heat:
    """What is known of each content's heat, for all tiers of one replica.

    Hot is what the last turns of live sessions hold, and what was swapped in a moment ago.
    """

    def __init__(self, eviction: Eviction = "lru") -> None:
        """`eviction` decides whether uses count at all."""
        self.eviction = eviction
        self._hot: Counter[bytes] = Counter()
        self._uses: dict[bytes, int] = {}
        self._watchers: list[HeatWatcher] = []

    def watch(self, watcher: HeatWatcher) -> None:
        """Tell `watcher` of each change."""
        self._watchers.append(watcher)

    def is_hot(self, digest: bytes) -> bool:
        """Whether content is to go last."""
        return digest in self._hot

    def uses(self, digest: bytes) -> int:
        """How often content was used of late, up to 15; always 0 under LRU."""
        return self._uses.get(digest, 0)

    def note_use(self, digest: bytes) -> None:
        """Count a use."""
        if self.eviction == "lru":
            return
        self._uses[digest] = min(self._uses.get(digest, 0) + 1, _MOST_USES)
        if len(self._uses) > _REMEMBERED_USES:
            self._uses = {key: uses // 2 for key, uses in self._uses.items() if uses > 1}
            for watcher in self._watchers:
                watcher.age()

    def warm(self, digests: Iterable[bytes]) -> None:
        """Add a reason for each content to be hot."""
        for digest in digests:
            self._hot[digest] += 1
            if self._hot[digest] == 1:
                self._refile(digest, coldest=False)

    def cool(self, digests: Iterable[bytes], *, coldest: bool) -> None:
        """Take a reason away. With `coldest`, who has none left goes first, the last one given before all."""
        for digest in digests:
            self._hot[digest] -= 1
            if self._hot[digest] <= 0:
                del self._hot[digest]
                self._refile(digest, coldest=coldest)

    def _refile(self, digest: bytes, *, coldest: bool) -> None:
        for watcher in self._watchers:
            watcher.refile(digest, coldest=coldest)
