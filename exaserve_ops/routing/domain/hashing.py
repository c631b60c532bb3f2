"""Rendezvous hashing: every gateway ranks the same members alike, without talking to another.

A member that joins takes about 1/n of the keys, and one that leaves gives up only its own. Keys and
members are hashed with BLAKE2b once; the pairs are mixed with integer arithmetic, because a fleet
has thousands of members and a ranking is computed in a request's path.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

_Member = TypeVar("_Member")

_MASK = (1 << 64) - 1


def key_seed(key: str) -> int:
    """64-bit hash of a key, to be ranked against members."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=65_536)
def member_seed(name: str) -> int:
    """64-bit hash of a member's name; cached, since members are few and asked for often."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"member")
    return int.from_bytes(digest.digest(), "little")


def score(seed: int, name: str) -> int:
    """How strongly a key wants a member: uniform in 64 bits, and equal on every machine."""
    mixed = seed ^ member_seed(name)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def rank(seed: int, members: Sequence[_Member], name_of: Callable[[_Member], str]) -> list[_Member]:
    """Order all members by how strongly a key wants them; the order is the fail-over order.

    The name breaks a tie, so that the order never depends on the order of the input.
    """
    return sorted(
        members,
        key=lambda member: (score(seed, name := name_of(member)), name),
        reverse=True,
    )


def first(seed: int, members: Sequence[_Member], name_of: Callable[[_Member], str]) -> _Member:
    """Return what `rank` puts first, without ordering the others. Raises `ValueError` if there is nobody."""
    return max(members, key=lambda member: (score(seed, name := name_of(member)), name))
