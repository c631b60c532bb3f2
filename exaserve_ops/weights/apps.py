"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class WeightsConfig(AppConfig):
    """Claims on nodes' disks, and what is there."""

    name = "exaserve_ops.weights"
    label = "weights"
    default_auto_field = "django.db.models.BigAutoField"
