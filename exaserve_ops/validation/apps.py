"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class ValidationConfig(AppConfig):
    """Validation of models."""

    name = "exaserve_ops.validation"
    label = "validation"
    default_auto_field = "django.db.models.BigAutoField"
