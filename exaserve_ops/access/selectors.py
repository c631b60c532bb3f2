"""Looking up of API keys."""

from __future__ import annotations

from datetime import datetime

from django.db.models import Q, QuerySet

from exaserve_ops.access.domain.keys import hash_key
from exaserve_ops.access.models import ApiKey, Scope


def valid_keys(scope: Scope, *, now: datetime) -> QuerySet[ApiKey]:
    """Keys of a scope that open something now."""
    unexpired = Q(expires_at__isnull=True) | Q(expires_at__gt=now)
    return ApiKey.objects.filter(
        unexpired, revoked_at__isnull=True, user__is_active=True, scopes__contains=[scope]
    ).select_related("user")


def find_valid_key(text: str, scope: Scope, *, now: datetime) -> ApiKey | None:
    """Return the key with this text, or `None` if it opens nothing."""
    return valid_keys(scope, now=now).filter(sha256=hash_key(text)).first()
