"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class SessionsConfig(AppConfig):
    """Inference sessions; Django's own app took the short label."""

    name = "exaserve_ops.sessions"
    label = "inference_sessions"
    default_auto_field = "django.db.models.BigAutoField"
