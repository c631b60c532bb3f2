"""Who may do what: three groups, each with what the one before it may do and more."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

VIEWER = "viewer"
OPERATOR = "operator"
ADMIN = "admin"

MANAGE_KEYS_OF_OTHERS = "access.manage_keys_of_others"

FLEET_APPS = frozenset(
    {
        *("access", "audit", "health", "inventory", "inference_sessions", "rollouts", "serving"),
        *("telemetry", "validation", "weights"),
    }
)
"""Labels of the product's own apps."""

PEOPLE = frozenset({"user", "group"})
"""Models of `auth` that an admin may change; giving rights is as good as having them."""

_NOT_FOR_VIEWERS = frozenset({"access.view_idempotencyrecord"})
"""Stored answers may hold what only their caller was meant to read."""

_OPERATOR_CHANGES = frozenset(
    {
        "access.add_apikey",
        "access.change_apikey",
        "health.change_incident",
        "inference_sessions.add_relocation",
        "inventory.add_jointoken",
        "inventory.change_node",
        "inventory.end_process",
        "inventory.install_node",
        "rollouts.add_rollout",
        "rollouts.approve_rollout",
        "rollouts.change_rollout",
        "serving.add_deployment",
        "serving.add_model",
        "serving.add_modelimport",
        "serving.change_modelimport",
        "serving.change_deployment",
        "serving.change_replica",
        "serving.change_startrules",
        "serving.delete_deployment",
        "serving.change_model",
        "validation.add_validation",
        "validation.change_validation",
        "weights.add_weightsclaim",
        "weights.change_weightsclaim",
        "weights.delete_weightsclaim",
        "weights.change_prewarmpolicy",
    }
)


@dataclass(frozen=True, slots=True)
class Role:
    """A group that the product keeps, and what it is for."""

    name: str
    meaning: str


ROLES = (
    Role(VIEWER, "Reads everything, changes nothing."),
    Role(OPERATOR, "Runs the fleet: deployments, nodes, replicas, models, keys of their own."),
    Role(ADMIN, "Everything, with users and the keys of others."),
)


def permissions_of(role: str, existing: Iterable[str]) -> frozenset[str]:
    """Return which of the existing permissions (`app.codename`) a role has.

    Raises `ValueError` for a role that does not exist.
    """
    known = frozenset(existing)
    viewer = frozenset(p for p in known if _reads_the_fleet(p))
    if role == VIEWER:
        return viewer
    if role == OPERATOR:
        return viewer | (_OPERATOR_CHANGES & known)
    if role == ADMIN:
        return frozenset(p for p in known if _is_of_the_fleet(p) or _is_about_people(p))
    raise ValueError(f"no role '{role}'")


def covers(own: Collection[str], other: Collection[str]) -> bool:
    """Whether somebody with `own` permissions may act for, or lend rights to, one with `other`."""
    return set(other) <= set(own)


def _reads_the_fleet(permission: str) -> bool:
    codename = permission.partition(".")[2]
    return (
        _is_of_the_fleet(permission) and codename.startswith("view_") and permission not in _NOT_FOR_VIEWERS
    )


def _is_of_the_fleet(permission: str) -> bool:
    return permission.partition(".")[0] in FLEET_APPS


def _is_about_people(permission: str) -> bool:
    app, _, codename = permission.partition(".")
    return app == "auth" and codename.partition("_")[2] in PEOPLE
