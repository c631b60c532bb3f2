"""Whom a check asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """One start of one replica."""

    replica_id: str
    node_id: str
    host: str
    port: int
    attempt: int
    model: str
    """The name that its engine goes by."""
    token: str | None = None
    """Its engine's key; `None`: its node is not recorded any more."""


def read_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, where the host may be an IPv6 address in brackets.

    Raises `ValueError` for anything else.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"'{address}' is no address of an engine")
    return host.strip("[]"), int(port)
