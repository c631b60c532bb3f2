"""One leader among any number of controllers: a lease with an epoch, by the clock of Postgres alone.

A lock on a connection is not enough: a leader that is stopped (SIGSTOP, a frozen machine) keeps its
connection. The lease runs out after two seconds without a renewal, a spare takes it with a higher
epoch, and the fence sees to it that whoever led before changes nothing any more when it wakes up:

* every transaction of a leader's thread begins by taking a shared lock and reading the epoch;
* a spare takes the lead under the same lock, exclusively, so that no transaction of the old epoch is
  under way at that moment and none can begin after it;
* a transaction in which its process stands still is ended by Postgres before the lease runs out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import connection
from psycopg.pq import TransactionStatus

LEASE_SECONDS = 2.0
IDLE_TRANSACTION_SECONDS = 1.5
"""Postgres ends a leader's transaction in which nothing happens for so long."""
LOCK_KEY = 0x65786C656164
"""`exlead` in ASCII; migrations have a lock of their own."""
_NAME = "controllers"

_ROW = """
INSERT INTO health_leaderlease (name, epoch, holder, renewed_at, expires_at)
VALUES (%(name)s, 0, '', 'epoch', 'epoch') ON CONFLICT DO NOTHING
"""
_IS_FREE = "SELECT expires_at < clock_timestamp() FROM health_leaderlease WHERE name = %(name)s"
_TAKE = """
WITH before AS (
    SELECT name, holder, renewed_at FROM health_leaderlease
    WHERE name = %(name)s AND expires_at < clock_timestamp() FOR UPDATE
)
UPDATE health_leaderlease AS lease
SET epoch = lease.epoch + 1, holder = %(holder)s, renewed_at = clock_timestamp(),
    expires_at = clock_timestamp() + make_interval(secs => %(seconds)s)
FROM before WHERE lease.name = before.name
RETURNING lease.epoch,
    CASE WHEN before.holder = '' THEN 0
         ELSE extract(epoch FROM clock_timestamp() - before.renewed_at) END
"""
_RENEW = """
UPDATE health_leaderlease
SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => %(seconds)s)
WHERE name = %(name)s AND epoch = %(epoch)s RETURNING 1
"""
_RELEASE = """
UPDATE health_leaderlease SET holder = '', expires_at = clock_timestamp() - interval '1 microsecond'
WHERE name = %(name)s AND epoch = %(epoch)s
"""
# Two statements: the second one's snapshot must be newer than the lock.
_FENCE = f"""
SELECT set_config('idle_in_transaction_session_timeout', '{IDLE_TRANSACTION_SECONDS * 1000:.0f}', true),
    pg_advisory_xact_lock_shared({LOCK_KEY});
SELECT epoch FROM health_leaderlease WHERE name = '{_NAME}'
"""  # noqa: S608 - constants of this module


class FencedError(Exception):
    """Another controller leads: what this thread was about to do is not done."""


class LeaderLease:
    """Try for the lead, keep it, and fence what is done in its name."""

    def __init__(self, database_url: str, holder: str, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self._database_url = database_url
        self.holder = holder
        """Whom the record names."""
        self._lease_seconds = lease_seconds
        self._connection: psycopg.Connection | None = None
        self._valid_until = 0.0
        self.epoch = 0
        """Rises with each change of hands; 0 before the lead was ever won."""
        self.idle_seconds = 0.0
        """For how long nobody had led; 0 where the last leader gave the lead up on purpose."""

    def acquire(self) -> bool:
        """Try once. Raises `psycopg.Error` where Postgres is away."""
        link = self._connect()
        free = link.execute(_IS_FREE, self._values).fetchone()
        if free is None:
            link.execute(_ROW, self._values)
        elif not free[0]:
            return False
        with link.transaction():
            # Waits for what the old leader has under way; Postgres ends that if it stands still.
            link.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK_KEY])
            asked_at = time.monotonic()
            taken = link.execute(_TAKE, self._values).fetchone()
        if taken is None:
            return False
        self.epoch, self.idle_seconds = int(taken[0]), max(0.0, float(taken[1]))
        self._valid_until = asked_at + self._lease_seconds
        return True

    def renew(self) -> bool:
        """Prolong the lease; `False` says that another leads.

        Raises `ConnectionError` where Postgres is away: then nobody else can take the lead either, and
        what this one does fails by itself.
        """
        asked_at = time.monotonic()
        try:
            kept = self._connect().execute(_RENEW, self._values).fetchone()
        except psycopg.Error as error:
            self._disconnect()
            raise ConnectionError(f"the lease cannot be renewed: {error}") from error
        if kept is None:
            self._valid_until = 0.0
            return False
        self._valid_until = asked_at + self._lease_seconds
        return True

    def is_held(self) -> bool:
        """Whether nobody else can lead yet, by our own monotonic clock."""
        return time.monotonic() < self._valid_until

    def release(self) -> None:
        """Give the lead up at once, so that a spare need not wait for its end."""
        self._valid_until = 0.0
        with contextlib.suppress(psycopg.Error):  # it runs out by itself
            if self.epoch:
                self._connect().execute(_RELEASE, self._values)
        self._disconnect()

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """Let transactions of this thread begin only while the lead is ours: else `FencedError`."""
        with connection.execute_wrapper(self._check_first):
            yield

    @property
    def _values(self) -> dict[str, Any]:
        return {
            "name": _NAME,
            "holder": self.holder,
            "seconds": self._lease_seconds,
            "epoch": self.epoch,
        }

    def _check_first(
        self,
        execute: Callable[..., Any],
        sql: str,
        params: Any,  # noqa: ANN401 - Django's signature
        many: bool,  # noqa: FBT001 - as above
        context: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - as above
        database = context["connection"]
        link = database.connection
        if database.in_atomic_block and link.info.transaction_status == TransactionStatus.IDLE:
            self._check(link)
        return execute(sql, params, many, context)

    def _check(self, link: psycopg.Connection) -> None:
        cursor = link.execute(_FENCE)
        cursor.nextset()
        row = cursor.fetchone()
        if row is None or row[0] != self.epoch:
            now = row[0] if row else "gone"
            raise FencedError(f"epoch {self.epoch} is over; the lead is at epoch {now}")

    def _connect(self) -> psycopg.Connection:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self._database_url, autocommit=True, connect_timeout=3)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
