"""Who may do what over REST: deny by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_framework.permissions import BasePermission
from rest_framework.request import Request

if TYPE_CHECKING:  # views read their defaults, this module among them, while they are imported
    from rest_framework.views import APIView


class ModelPermissions(BasePermission):
    """An action needs the Django permission that its view names for it; one without a name is refused.

    Signing in alone opens nothing: reading needs the `view` permission.
    """

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Whether the caller has the permission of the view's action."""
        user = request.user
        if not user.is_authenticated or not user.is_active:
            return False
        action = getattr(view, "action", "")
        if action is None or (request.method or "").lower() not in view.http_method_names:
            return True  # no handler for this method: what follows is 405, for whoever is signed in
        needed = getattr(view, "permission_by_action", {}).get(action)
        return needed is not None and user.has_perm(needed)
