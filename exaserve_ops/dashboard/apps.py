"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class DashboardConfig(AppConfig):
    """Pages and live views."""

    name = "exaserve_ops.dashboard"
    label = "dashboard"
    default_auto_field = "django.db.models.BigAutoField"
