"""Who may do what over REST: Django's model permissions, reading included."""

from __future__ import annotations

from rest_framework.permissions import DjangoModelPermissions


class ModelPermissions(DjangoModelPermissions):
    """Like the base class, but reading needs the `view` permission too."""

    perms_map = DjangoModelPermissions.perms_map | {
        "GET": ["%(app_label)s.view_%(model_name)s"],
        "HEAD": ["%(app_label)s.view_%(model_name)s"],
    }
