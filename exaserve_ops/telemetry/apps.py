"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    """Samples and roll-ups."""

    name = "exaserve_ops.telemetry"
    label = "telemetry"
    default_auto_field = "django.db.models.BigAutoField"
