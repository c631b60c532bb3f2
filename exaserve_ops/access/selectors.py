"""Looking up of API keys, of who may manage them, and of answers already given."""

from __future__ import annotations

from datetime import datetime

from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.models import AbstractUser
from django.db.models import Q, QuerySet

from exaserve_ops.access.domain.keys import hash_key
from exaserve_ops.access.domain.roles import MANAGE_KEYS_OF_OTHERS, covers
from exaserve_ops.access.models import ApiKey, IdempotencyRecord, Scope


def valid_keys(scope: Scope, *, now: datetime) -> QuerySet[ApiKey]:
    """Keys of a scope that open something now."""
    unexpired = Q(expires_at__isnull=True) | Q(expires_at__gt=now)
    return ApiKey.objects.filter(
        unexpired, revoked_at__isnull=True, user__is_active=True, scopes__contains=[scope]
    ).select_related("user")


def find_valid_key(text: str, scope: Scope, *, now: datetime) -> ApiKey | None:
    """Return the key with this text, or `None` if it opens nothing."""
    return valid_keys(scope, now=now).filter(sha256=hash_key(text)).first()


def keys_managed_by(user: AbstractUser) -> QuerySet[ApiKey]:
    """Keys that a user may list and revoke: their own, or all."""
    keys = ApiKey.objects.select_related("user")
    return keys if user.has_perm(MANAGE_KEYS_OF_OTHERS) else keys.filter(user=user.pk)


def may_make_keys_for(maker: AbstractUser, owner: AbstractUser) -> bool:
    """Whether `maker` may hand out a key that acts as `owner`.

    Never one that could do more than its maker: that would be a way up.
    """
    if maker.pk == owner.pk or maker.is_superuser:
        return True
    if owner.is_superuser or not maker.has_perm(MANAGE_KEYS_OF_OTHERS):
        return False
    return covers(maker.get_all_permissions(), owner.get_all_permissions())


def find_answer(user: AbstractBaseUser, key: str) -> IdempotencyRecord | None:
    """Return what a user was answered to the POST with this idempotency key."""
    return IdempotencyRecord.objects.filter(user=user.pk, key=key).first()
