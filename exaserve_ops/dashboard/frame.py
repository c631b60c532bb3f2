"""What surrounds every page: the rail, the theme, the bell. Added to each template's context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from exaserve_ops.dashboard.problems import count_open_problems

THEMES = ("light", "dark")
THEME_COOKIE = "theme"


@dataclass(frozen=True, slots=True)
class RailItem:
    """One entry of the rail: address name, icon, word, and the permission to see it."""

    name: str
    icon: str
    word: str
    permission: str
    pages: tuple[str, ...] = ()
    """Other pages that belong under this entry."""


RAIL = (
    RailItem("fleet", "fleet", "Fleet", "inventory.view_node"),
    RailItem(
        "nodes",
        "node",
        "Nodes",
        "inventory.view_node",
        ("node", "cordon", "node_join", "installations", "installation", "installation_new"),
    ),
    RailItem(
        "deployments",
        "deployment",
        "Deployments",
        "serving.view_deployment",
        (
            "deployment",
            "deployment_new",
            "deployment_import",
            "deployment_scale",
            "deployment_delete",
            "rollout_new",
        ),
    ),
    RailItem("replicas", "replica", "Replicas", "serving.view_replica", ("replica",)),
    RailItem(
        "sessions",
        "session",
        "Sessions",
        "inference_sessions.view_inferencesession",
        ("session", "session_moves"),
    ),
    RailItem("rollouts", "rollout", "Rollouts", "rollouts.view_rollout", ("rollout",)),
    RailItem(
        "models",
        "model",
        "Models",
        "serving.view_model",
        ("model", "model_new", "model_imports", "model_import", "model_import_new"),
    ),
    RailItem(
        "validations",
        "check",
        "Validations",
        "validation.view_validation",
        ("validation", "validation_new"),
    ),
    RailItem("weights", "weights", "Weights", "weights.view_nodeweights", ("weights_of_model",)),
    RailItem("capacity", "capacity", "Capacity", "serving.view_model"),
    RailItem("incidents", "alert", "Incidents", "health.view_incident", ("incident",)),
    RailItem("events", "event", "Events", "audit.view_event"),
    RailItem("keys", "key", "Keys", "access.view_apikey"),
)


IN_BOTTOM_BAR = 4
"""Entries that a phone shows beside "More"; the others are behind it."""


@dataclass(frozen=True, slots=True)
class Rail:
    """The entries that a user may see, parted for narrow screens."""

    first: tuple[RailItem, ...]
    rest: tuple[RailItem, ...]
    here_in_rest: bool
    """Whether the page that is open belongs to the rest."""


def rail_of(items: Sequence[RailItem], here: str) -> Rail:
    """Part the entries; `here` is the name of the open page."""
    rest = tuple(items[IN_BOTTOM_BAR:])
    return Rail(tuple(items[:IN_BOTTOM_BAR]), rest, any(here in {i.name, *i.pages} for i in rest))


def page_frame(request: HttpRequest) -> dict[str, Any]:
    """Context of the frame. Counts are read only where a template shows them."""
    theme = request.COOKIES.get(THEME_COOKIE, "")
    user = request.user
    match = request.resolver_match
    here = match.view_name if match else ""
    return {
        "theme": theme if theme in THEMES else "",
        "fleet_name": getattr(settings, "FLEET_NAME", "ExaServe"),
        "base_path": settings.FORCE_SCRIPT_NAME or "",
        "rail": rail_of([item for item in RAIL if user.has_perm(item.permission)], here),
        "here": here,
        "problem_count": SimpleLazyObject(count_open_problems),
        "debug": settings.DEBUG,
        "redis_password_is_shared": not settings.ENV.redis_node_users,
    }
