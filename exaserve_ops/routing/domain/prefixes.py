"""Which replicas have the beginning of a prompt in their KV, as far as routing has taught it. Pure.

A prompt is named by a chain of digests, each one covering all of it up to a point; equal digests mean
equal beginnings. Where a request went, its beginning is afterwards, until the engine evicts it. So a
router that remembers where it sent what knows most of it without asking anybody.

The choice weighs both sides in one unit, the tokens that stand between a request and its first token:
those queued at a replica, and those of the prompt that it does not have. A popular beginning spreads
by itself: as soon as its replicas have more queued than the beginning would take to compute, somebody
else is cheaper, and has it from then on.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

DIGEST_BYTES = 8
FIRST_PIECE_BYTES = 256
EVEN_PIECES = 16
"""Pieces of equal size at the start, where prompts part most; each later one is a quarter longer."""
_GROWTH = 1.25
BYTES_PER_TOKEN = 4.0
"""Of English text under the vocabularies in use; for weighing, not for counting."""
NEWS_SECONDS = 20.0
"""A beginning that was sent to its replica again after so long is worth telling other gateways."""
DECODE_TOKENS = 512.0
"""What one open request costs a new one, in queued tokens of prefill; see `cost_tokens`."""
CROWD_REQUESTS = 32.0
"""Open requests from which each costs twice as much: a large batch makes every token of it slower."""
PRICE_OF_WORK = 4.0
"""How many queued tokens one is worth that is computed though somebody has it: it delays all who come
after it, too. The busier a fleet, the more that counts: with 1 a loaded fleet computes more than it must."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A prompt's digests from short to long, and the size of what each one covers."""

    digests: tuple[bytes, ...]
    sizes_tokens: tuple[float, ...]
    total_tokens: float


def describe_text(text: bytes) -> Beginning:
    """Name the beginnings of a prompt's bytes.

    Ends lie at fixed places, so that two prompts with an equal beginning share its digests up to the
    last place before they part.
    """
    digests: list[bytes] = []
    sizes: list[float] = []
    running = hashlib.blake2b(digest_size=DIGEST_BYTES)
    start = 0
    for end in _places(len(text)):
        running.update(text[start:end])
        digests.append(running.digest())
        sizes.append(end / BYTES_PER_TOKEN)
        start = end
    return Beginning(tuple(digests), tuple(sizes), len(text) / BYTES_PER_TOKEN)


def _places(length: int) -> Iterator[int]:
    size = float(FIRST_PIECE_BYTES)
    end, count = 0.0, 0
    while True:
        end += size
        if end > length:
            return
        yield int(end)
        count += 1
        if count >= EVEN_PIECES:
            size *= _GROWTH


class Server(Protocol):
    """A replica that a prompt can be sent to."""

    @property
    def name(self) -> str:
        """Identity."""

    @property
    def in_flight(self) -> int:
        """Requests that are open there."""

    @property
    def reported_requests(self) -> int | None:
        """Running and waiting as its engine said a moment ago, those of other gateways included."""

    @property
    def pending_tokens(self) -> float:
        """Prompt tokens sent there that no first token has come for, less those it had cached."""

    @property
    def weight(self) -> float:
        """Share of new work it is to get against a well replica, 0-1."""


S = TypeVar("S", bound=Server)


class PrefixMemory:
    """Which replicas were sent which beginnings, and when: bounded, the least recently used go first."""

    def __init__(self, *, most_digests: int = 65_536, most_holders: int = 8) -> None:
        """Remember so many beginnings, and so many replicas for each."""
        self._most_digests = most_digests
        self._most_holders = most_holders
        self._holders: OrderedDict[bytes, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        """Beginnings that are remembered."""
        return len(self._holders)

    def holders(self, digest: bytes) -> Iterator[tuple[str, float]]:
        """The replicas that have this beginning and when each was sent it last, the latest first."""
        return reversed(self._holders.get(digest, {}).items())

    def note(self, digests: Iterable[bytes], name: str, now: float) -> list[bytes]:
        """Remember that a replica is about to have these beginnings.

        Returns those of them that are news: not known of this replica, or not said for a while.
        """
        news = []
        for digest in digests:
            holders = self._holders.setdefault(digest, {})
            noted_at_seconds = holders.pop(name, None)
            if noted_at_seconds is None or now - noted_at_seconds > NEWS_SECONDS:
                news.append(digest)
            # Others' news are late: they do not take back what was seen since.
            holders[name] = now if noted_at_seconds is None else max(now, noted_at_seconds)
            if len(holders) > self._most_holders:
                del holders[next(iter(holders))]
            self._holders.move_to_end(digest)
        while len(self._holders) > self._most_digests:
            self._holders.popitem(last=False)
        return news


@dataclass(frozen=True, slots=True)
class PrefixChoice(Generic[S]):
    """A replica, and the tokens of the prompt that it is thought to have."""

    server: S
    cached_tokens: float


def cost_tokens(server: Server, uncached_tokens: float) -> float:
    """What stands between a prompt and its first token at a replica, in tokens of prefill.

    What is queued before it, itself, and what open requests take of each step; all the slower, the
    lower the replica's weight.
    """
    requests = max(server.in_flight, server.reported_requests or 0)
    decoding = DECODE_TOKENS * requests * (1.0 + requests / CROWD_REQUESTS)
    work = server.pending_tokens + PRICE_OF_WORK * uncached_tokens + decoding
    return work / max(server.weight, 1e-3)


def _never(_name: str) -> float:
    """Nothing is known to have been evicted."""
    return -math.inf


def choose_by_prefix(
    beginning: Beginning,
    memory: PrefixMemory,
    find: Callable[[str, float], S | None],
    others: Sequence[S],
    *,
    evicted_until: Callable[[str], float] = _never,
) -> PrefixChoice[S] | None:
    """Pick the cheapest of those that have a part of the prompt and of `others`, drawn by the caller.

    `find` gives a replica by its name if it can take the prompt, of which it has so many tokens, or
    `None`. What a replica was sent before `evicted_until` it has no more. Looks at a few replicas
    whatever the size of the fleet. `None` if there is nobody.
    """
    cached: dict[str, tuple[S, float]] = {server.name: (server, 0.0) for server in others}
    asked: dict[str, float] = {}
    """When a replica evicted last; `inf` once it has been found."""
    longest_first = zip(reversed(beginning.digests), reversed(beginning.sizes_tokens), strict=True)
    for digest, size in longest_first:
        for name, noted_at_seconds in memory.holders(digest):
            until = asked.get(name)
            if until is None:
                until = asked[name] = evicted_until(name)
            if noted_at_seconds < until:
                continue
            asked[name] = math.inf
            server = find(name, size)
            if server is not None:
                cached[name] = (server, size)
    best = min(
        cached.values(),
        key=lambda entry: (cost_tokens(entry[0], beginning.total_tokens - entry[1]), entry[0].name),
        default=None,
    )
    return None if best is None else PrefixChoice(*best)
