"""Keeps one user in Redis for each node in service, whatever became of Redis or of the node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from exaserve_ops.inventory.domain.store_users import StoreUsersRefusedError, UserPlan, plan_users
from exaserve_ops.inventory.selectors import nodes_in_service

LOOK_EVERY_SECONDS = 2.0
"""A node whose keys were revoked is cut off so soon, and a Redis that lost its users has them again."""

PasswordSource = Callable[[str, int], str]
"""SHA-256 of the password of a node's user, by node id and key epoch."""

_log = logging.getLogger(__name__)


class StoreLook(Protocol):
    """What is there."""

    @property
    def run_id(self) -> str:
        """Changes whenever Redis was restarted, or another one answers."""
        ...

    @property
    def nodes(self) -> frozenset[str]:
        """Ids of the nodes that have a user."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether anyone may do everything without a password."""
        ...


class StoreUsers(Protocol):
    """Users in Redis. All raise `StoreAwayError` or `StoreUsersRefusedError`."""

    def look(self) -> StoreLook:
        """Say who is there."""
        ...

    def read_passwords(self, node_ids: Collection[str], /) -> Mapping[str, str]:
        """Hash of the password that stands for each."""
        ...

    def apply(self, plan: UserPlan, /) -> None:
        """Carry a plan out."""
        ...


class StoreUserKeeper:
    """Compares the record with Redis and mends the difference; called again and again."""

    def __init__(self, users: StoreUsers, password_of: PasswordSource) -> None:
        self._users = users
        self._password_of = password_of
        self._run_id = ""
        self._ours: dict[str, str] = {}
        self._passwords: dict[str, tuple[int, str]] = {}
        self._refusals = 0
        self._warned_open = False

    def step(self) -> None:
        """One comparison. Raises `StoreAwayError`; a refusal is logged, now and then."""
        try:
            self._compare()
        except StoreUsersRefusedError as error:
            self._refusals += 1
            if self._refusals & (self._refusals - 1) == 0:
                _log.error("event=store_users_refused count=%d detail=%s", self._refusals, error)
            return
        self._refusals = 0

    def _compare(self) -> None:
        # Redis first: whoever has a user by now is in the record by the time that it is read.
        look = self._users.look()
        self._note(look)
        wanted = self._wanted()
        ours = {node: digest for node, digest in self._ours.items() if node in look.nodes}
        unread = {node for node in look.nodes if node in wanted and node not in ours}
        present = dict.fromkeys(look.nodes, "") | ours | dict(self._users.read_passwords(unread))
        plan = plan_users(wanted, present, ours)
        if not plan:
            return
        self._users.apply(plan)
        self._ours = wanted
        _log.info(
            "event=store_users written=%d cut=%d dropped=%d", len(plan.write), len(plan.cut), len(plan.drop)
        )

    def _note(self, look: StoreLook) -> None:
        if look.run_id != self._run_id:
            # Another Redis, or the same one started anew: nothing of ours need be left there.
            self._run_id, self._ours = look.run_id, {}
        if look.is_open and not self._warned_open:
            _log.warning(
                "event=store_is_open detail=Redis asks nobody for a password, so the users of nodes keep "
                "nobody out; set one (requirepass) and give it in REDIS_URL"
            )
        self._warned_open = look.is_open

    def _wanted(self) -> dict[str, str]:
        rows = {str(pk): epoch for pk, epoch in nodes_in_service().values_list("pk", "key_epoch")}
        self._passwords = {
            node: known
            if (known := self._passwords.get(node)) is not None and known[0] == epoch
            else (epoch, self._password_of(node, epoch))
            for node, epoch in rows.items()
        }
        return {node: digest for node, (_, digest) in self._passwords.items()}
