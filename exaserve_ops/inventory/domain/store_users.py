"""Which users Redis should have: one for each node in service, with the password of its key epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exaserve_ops.lib.errors import OpsError


class StoreUsersRefusedError(OpsError):
    """Redis does not let us make users; the text says what to do."""


class StoreAwayError(OpsError):
    """Redis does not answer now; another try may work."""


@dataclass(frozen=True, slots=True)
class UserPlan:
    """What is to be done, by node id."""

    write: Mapping[str, str]
    """Users to make or to set again, with the SHA-256 of their passwords in hex."""
    cut: frozenset[str]
    """Those of them whose open connections were made with a password that is over."""
    drop: frozenset[str]
    """Users of nodes that are gone; their connections end with them."""

    def __bool__(self) -> bool:
        return bool(self.write or self.drop)


def plan_users(wanted: Mapping[str, str], present: Mapping[str, str], ours: Mapping[str, str]) -> UserPlan:
    """Compare what should stand with what does; all three by node id, with hashes of passwords.

    `ours` are those of `present` that this process wrote itself, so their rights are known to be the
    present ones; others are written again, which their connections do not notice.
    """
    write = {node: digest for node, digest in wanted.items() if ours.get(node) != digest}
    return UserPlan(
        write=write,
        cut=frozenset(node for node in write if present.get(node, write[node]) != write[node]),
        drop=frozenset(present.keys() - wanted.keys()),
    )
