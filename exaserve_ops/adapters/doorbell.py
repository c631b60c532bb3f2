"""Hints out of Postgres: `LISTEN` on a connection of its own."""

from __future__ import annotations

import psycopg

from exaserve_ops.lib.hints import CHANNEL


class PostgresDoorbell:
    """Listens for `lib.hints`. Reconnects on use; what rang meanwhile the full resync finds."""

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url
        self._connection: psycopg.Connection | None = None

    def wait(self, seconds: float) -> list[tuple[str, str]]:
        """Return the (kind, key) pairs that rang. Raises `psycopg.Error` where Postgres is away."""
        try:
            connection = self._connected()
            notifies = list(connection.notifies(timeout=seconds, stop_after=1))
            notifies += list(connection.notifies(timeout=0))
        except psycopg.Error:
            self.close()
            raise
        # One reconcile answers any number of rings: keep the first of each.
        rung = dict.fromkeys(notify.payload for notify in notifies)
        return [(kind, key) for kind, _, key in (payload.partition(":") for payload in rung)]

    def close(self) -> None:
        """Let the connection go."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> psycopg.Connection:
        if self._connection is None:
            self._connection = psycopg.connect(self._database_url, autocommit=True)
            self._connection.execute(f"LISTEN {CHANNEL}")
        return self._connection
