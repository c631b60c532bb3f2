"""Django's entry to this app."""

from __future__ import annotations

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class AccessConfig(AppConfig):
    """API keys and idempotency keys."""

    name = "exaserve_ops.access"
    label = "access"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Keep the groups of the product in step with its permissions, after each `migrate`."""
        post_migrate.connect(_seed_roles, sender=self)


def _seed_roles(**_signal: object) -> None:
    # Services need the app registry, which is not ready while this module is read.
    from exaserve_ops.access.services import seed_roles  # noqa: PLC0415 - see above

    seed_roles()
