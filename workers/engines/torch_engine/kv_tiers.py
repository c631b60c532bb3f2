"""What the scheduler asks of the tiers below its blocks, and what it gets where there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from workers.kv.tiers.fetch import Fetch


class KvTiers(Protocol):
    """Where content is that had to leave its blocks."""

    @property
    def tend_seconds(self) -> float | None:
        """How often `tend` is to be called while nothing is computed; `None`: never."""
        ...

    @property
    def queues_instead(self) -> bool:
        """Whether requests are to wait rather than to push hot content out."""
        ...

    def tend(self) -> None:
        """Go on with what is under way. Before each step."""
        ...

    def choose_fetch(self, chain: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the next digests of a chain that are worth fetching rather than computing."""
        ...

    def is_coming(self, digest: bytes) -> bool:
        """Whether some fetch brings this content already."""
        ...

    def fetch(self, digests: Sequence[bytes], blocks: Sequence[int], *, awaited: bool = True) -> Fetch:
        """Begin to bring content into blocks; `awaited`: a request waits for it."""
        ...

    def cancel(self, fetch: Fetch) -> None:
        """End a fetch: nothing is written to its blocks any more."""
        ...

    def follow(self, moves: Mapping[int, int]) -> None:
        """Go on with blocks that lie elsewhere now."""
        ...

    def keep(self, digests: Sequence[bytes], blocks: Sequence[int]) -> bool:
        """Copy a request's blocks down if that is worth it; returns whether all of them are there."""
        ...


class NoTiers:
    """Nothing below: what is evicted is computed again."""

    tend_seconds: float | None = None
    queues_instead: bool = False

    def tend(self) -> None:
        """Nothing is under way."""

    def choose_fetch(self, chain: Sequence[bytes]) -> tuple[bytes, ...]:  # noqa: ARG002 - a port
        """Nothing can be fetched."""
        return ()

    def is_coming(self, digest: bytes) -> bool:  # noqa: ARG002 - a port
        """Nothing is fetched."""
        return False

    def fetch(self, digests: Sequence[bytes], blocks: Sequence[int], *, awaited: bool = True) -> Fetch:  # noqa: ARG002 - a port
        """Nothing comes."""
        fetch = Fetch(digests, blocks, began_at=0.0)
        fetch.end()
        return fetch

    def cancel(self, fetch: Fetch) -> None:
        """Nothing is fetched."""

    def follow(self, moves: Mapping[int, int]) -> None:
        """Nothing is fetched."""

    def keep(self, digests: Sequence[bytes], blocks: Sequence[int]) -> bool:  # noqa: ARG002 - a port
        """Nothing is kept."""
        return False
