"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class AccessConfig(AppConfig):
    """API keys and idempotency keys."""

    name = "exaserve_ops.access"
    label = "access"
    default_auto_field = "django.db.models.BigAutoField"
