"""Deployments that are made to try an engine: nobody's requests may reach them. Pure."""

from __future__ import annotations

PRIVATE_PREFIX = "validation:"
"""Served names that begin so are no client's: gateways connect to such replicas and send nobody there."""


def is_private(served_name: str) -> bool:
    """Whether this name is no client's."""
    return served_name.startswith(PRIVATE_PREFIX)
