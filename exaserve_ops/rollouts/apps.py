"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class RolloutsConfig(AppConfig):
    """Staged rollouts of releases."""

    name = "exaserve_ops.rollouts"
    label = "rollouts"
    default_auto_field = "django.db.models.BigAutoField"
