"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class ApiConfig(AppConfig):
    """REST."""

    name = "exaserve_ops.api"
    label = "api"
    default_auto_field = "django.db.models.BigAutoField"
