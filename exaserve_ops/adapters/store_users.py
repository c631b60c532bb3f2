"""Users of nodes in Redis, by its access control lists."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from exaserve_ops.inventory.domain.store_users import (
    StoreAwayError,
    StoreUsersRefusedError,
    UserPlan,
)
from workers.protocol import digests, store_user

_AT_ONCE = 128
"""Commands in one exchange: more would keep other clients of the store waiting."""

ADVICE = (
    "Nodes get users of their own, for which Redis 7.2 or Valkey is needed, and a user for REDIS_URL "
    "that may use ACL and CLIENT KILL. Where that cannot be had, EXAOPS_REDIS_NODE_USERS=off gives every "
    "node the address with the password that all share."
)


@dataclass(frozen=True, slots=True)
class StoreLook:
    """What is there."""

    run_id: str
    """Changes whenever Redis was restarted, or another one answers."""
    nodes: frozenset[str]
    """Ids of the nodes that have a user."""
    is_open: bool
    """Whether anyone may do everything without a password."""


def password_sha256(node_key: bytes) -> str:
    """Hash of the password of a node's user, as Redis keeps it."""
    return hashlib.sha256(digests.store_password(node_key).encode()).hexdigest()


class RedisStoreUsers:
    """Makes, changes and drops users.

    Every method raises `StoreAwayError` or `StoreUsersRefusedError`.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def look(self) -> StoreLook:
        """Say who is there, in one exchange."""
        with _translated():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.info("server")
            pipeline.acl_users()
            pipeline.acl_getuser("default")
            server, users, default = pipeline.execute()
        nodes = (store_user.node_of(_text(user)) for user in users)
        flags = {_text(flag) for flag in (default or {}).get("flags", ())}
        return StoreLook(
            run_id=str(server["run_id"]),
            nodes=frozenset(node for node in nodes if node),
            is_open={"on", "nopass"} <= flags,
        )

    def read_passwords(self, node_ids: Collection[str]) -> dict[str, str]:
        """Hash of the password that stands for each; empty where there is none, or several."""
        found: dict[str, str] = {}
        for some in _parts(sorted(node_ids)):
            with _translated():
                pipeline = self._redis.pipeline(transaction=False)
                for node_id in some:
                    pipeline.acl_getuser(store_user.user_of(node_id))
                answers = pipeline.execute()
            for node_id, user in zip(some, answers, strict=True):
                hashes = [_text(one) for one in (user or {}).get("passwords", ())]
                found[node_id] = hashes[0] if len(hashes) == 1 else ""
        return found

    def apply(self, plan: UserPlan) -> None:
        """Carry a plan out. Doing it twice is harmless."""
        commands: list[tuple[str, ...]] = []
        for node_id, digest in plan.write.items():
            commands.append(_set_user(node_id, digest))
            if node_id in plan.cut:
                commands.append(("CLIENT", "KILL", "USER", store_user.user_of(node_id)))
        commands += [("ACL", "DELUSER", store_user.user_of(node_id)) for node_id in sorted(plan.drop)]
        for some in _parts(commands):
            with _translated():
                pipeline = self._redis.pipeline(transaction=False)
                for command in some:
                    pipeline.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
                pipeline.execute()

    def admit(self, node_id: str, node_key: bytes) -> None:
        """Make the user of a node that joins."""
        self.apply(UserPlan({node_id: password_sha256(node_key)}, frozenset(), frozenset()))


def _set_user(node_id: str, digest: str) -> tuple[str, ...]:
    # Only the hash is sent: the password itself would stand in a trace of Redis's commands.
    rights = store_user.rights_of(node_id)
    return ("ACL", "SETUSER", store_user.user_of(node_id), "reset", "on", f"#{digest}", *rights)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except redis.AuthenticationError as error:
        raise StoreUsersRefusedError(f"Redis refuses the password in REDIS_URL: {error}") from error
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        raise StoreAwayError(f"Redis is not reached: {type(error).__name__}") from error
    except redis.ResponseError as error:
        raise StoreUsersRefusedError(f"Redis makes no users for us ({error}). {ADVICE}") from error


def _parts(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
