"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class HealthConfig(AppConfig):
    """Leases and verdicts."""

    name = "exaserve_ops.health"
    label = "health"
    default_auto_field = "django.db.models.BigAutoField"
