"""Django's entry to this app."""

from __future__ import annotations

import importlib

from django.apps import AppConfig


class ApiConfig(AppConfig):
    """REST."""

    name = "exaserve_ops.api"
    label = "api"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Let the schema know our authentication: extensions register themselves when they are read."""
        importlib.import_module("exaserve_ops.api.schema")
