"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig


class InventoryConfig(AppConfig):
    """Nodes and accelerators."""

    name = "exaserve_ops.inventory"
    label = "inventory"
    default_auto_field = "django.db.models.BigAutoField"
