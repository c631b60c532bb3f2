"""Doorbells: a service says that something changed, a controller looks.

A hint is a Postgres `NOTIFY`, so it is delivered when the transaction commits and not at all when it
does not. Hints may be lost or doubled; the regular full resync makes that harmless.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db import connection

CHANNEL = "exaops"


def ring(kind: str, key: object) -> None:
    """Say, at commit, that the object of this kind and key changed."""
    ring_all([(kind, key)])


def ring_all(hints: Iterable[tuple[str, object]]) -> None:
    """Ring for many objects, each as (kind, key), in one statement; each of them once."""
    payloads = list(dict.fromkeys(f"{kind}:{key}" for kind, key in hints))
    if payloads:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, rung) FROM unnest(%s::text[]) AS rung", [CHANNEL, payloads])
