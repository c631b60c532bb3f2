"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class ServingConfig(AppConfig):
    """Models, deployments, replicas."""

    name = "exaserve_ops.serving"
    label = "serving"
    default_auto_field = "django.db.models.BigAutoField"
