"""Entries of the session table, as if their turns had begun longer ago."""

from __future__ import annotations

import struct
from typing import cast

import redis

_ENTRY = struct.Struct("<8s4I")


def age_entries(client: redis.Redis, seconds: int) -> None:
    """Move the beginning of the last turn of all sessions back."""
    for key in client.scan_iter("exaops:s:*"):
        for field, raw in cast("dict[bytes, bytes]", client.hgetall(key)).items():
            owner, epoch, turns, context, at = _ENTRY.unpack(raw)
            client.hset(key, field, _ENTRY.pack(owner, epoch, turns, context, at - seconds))  # type: ignore[arg-type]  # bytes are taken
