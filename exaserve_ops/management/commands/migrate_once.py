"""Bring the database schema up to date, however many processes try at the same time."""

from __future__ import annotations

import argparse
import time
from typing import Any

import psycopg
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError, connection
from django.db.migrations.executor import MigrationExecutor

from exaserve_ops.settings.base import ENV

LOCK_KEY = 0x6578616F7073
"""Advisory lock of the one process that migrates: `exaops` in ASCII."""

_LONGEST_PAUSE_SECONDS = 2.0


class Command(BaseCommand):
    """One process migrates, the others wait until it is done."""

    help = "Apply migrations. Safe to run from many processes at once, and while Postgres starts."
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait at most")

    def handle(self, *_arguments: Any, **options: Any) -> None:  # noqa: ANN401 - Django's signature
        """Wait for the database, then migrate or wait for whoever does."""
        deadline = time.monotonic() + options["timeout"]
        pause_seconds = 0.1
        while True:
            try:
                if self._is_current_or_made_so():
                    return
                waits_for = "another process that migrates"
            except (OperationalError, psycopg.OperationalError) as error:
                # Such as "the database system is starting up" after a crash.
                waits_for = str(error).strip()
            if time.monotonic() > deadline:
                raise CommandError(f"gave up waiting for: {waits_for}")
            connection.close()
            time.sleep(pause_seconds)
            pause_seconds = min(_LONGEST_PAUSE_SECONDS, pause_seconds * 2)

    def _is_current_or_made_so(self) -> bool:
        if _is_current():
            self.stdout.write("up to date")
            return True
        # A connection of its own: the lock must not go back to a pool, nor end with a transaction.
        with psycopg.connect(ENV.database_url, autocommit=True) as direct:
            row = direct.execute("SELECT pg_try_advisory_lock(%s)", (LOCK_KEY,)).fetchone()
            if row is None or not row[0]:
                return False
            if not _is_current():
                call_command("migrate", interactive=False, verbosity=0)
        self.stdout.write("migrated")
        return True


def _is_current() -> bool:
    executor = MigrationExecutor(connection)
    return not executor.migration_plan(executor.loader.graph.leaf_nodes())
