"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class AuditConfig(AppConfig):
    """Audit events."""

    name = "exaserve_ops.audit"
    label = "audit"
    default_auto_field = "django.db.models.BigAutoField"
