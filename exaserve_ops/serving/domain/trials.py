"""Deployments that are made to try an engine: no client reaches them, and nobody else changes them. Pure."""

from __future__ import annotations

PRIVATE_PREFIX = "validation:"
"""Served names that begin so are no client's: gateways connect to such replicas and send nobody there."""


def is_private(served_name: str) -> bool:
    """Whether this name is no client's."""
    return served_name.startswith(PRIVATE_PREFIX)


def refusal_of_change(name: str, served_name: str) -> str:
    """Why people may not change a deployment or its replicas, and what to do; empty where they may.

    What changed a validation's trial under its hands would change its figures.
    """
    if not is_private(served_name):
        return ""
    return (
        f"deployment '{name}' is what a validation tries an engine in, and only the validation changes or"
        " deletes it: cancel the validation, and it is deleted by itself"
    )
