"""API keys as `Authorization: Bearer xo-…`."""

from __future__ import annotations

from typing import Any

from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from exaserve_ops.access.models import ApiKey, Scope
from exaserve_ops.access.selectors import find_valid_key
from exaserve_ops.lib import clock


class ApiKeyAuthentication(BaseAuthentication):
    """A key with the `api` scope acts with the rights of its user."""

    def authenticate(self, request: Request) -> tuple[Any, ApiKey] | None:
        """Return user and key, or `None` where no bearer is given. Raises for a bad one."""
        scheme, _, text = get_authorization_header(request).decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            return None
        key = find_valid_key(text.strip(), Scope.API, now=clock.now())
        if key is None:
            raise AuthenticationFailed(
                "This API key opens nothing here: it is unknown, revoked, expired, or lacks the scope 'api'."
            )
        return key.user, key

    def authenticate_header(self, request: Request) -> str:  # noqa: ARG002 - the base class's signature
        """Makes a refusal 401 rather than 403."""
        return 'Bearer realm="exaserve-ops"'
