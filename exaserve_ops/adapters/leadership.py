"""One leader among any number of controllers: an advisory lock on a connection of its own.

Postgres gives the lock up the moment the leader's connection ends, so a killed leader is replaced as
soon as a spare asks again, and two can never hold it.
"""

from __future__ import annotations

import psycopg

LOCK_KEY = 0x6578616F7073
"""`exaops` in ASCII."""


class LeaderLock:
    """Try for the lock, and say whether it is still held."""

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url
        self._connection: psycopg.Connection | None = None

    def acquire(self) -> bool:
        """Try once. Raises `psycopg.Error` where Postgres is away."""
        if self._connection is None:
            self._connection = psycopg.connect(self._database_url, autocommit=True)
        row = self._connection.execute("SELECT pg_try_advisory_lock(%s)", [LOCK_KEY]).fetchone()
        return bool(row and row[0])

    def is_held(self) -> bool:
        """Whether the connection that carries the lock still answers."""
        if self._connection is None:
            return False
        try:
            self._connection.execute("SELECT 1")
        except psycopg.Error:
            self.release()
            return False
        return True

    def release(self) -> None:
        """Give the lock up, with its connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
