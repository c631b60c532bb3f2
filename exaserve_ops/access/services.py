"""Making and revoking of API keys."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime

from django.contrib.auth.base_user import AbstractBaseUser
from django.db import transaction

from exaserve_ops.access.domain.keys import hash_key
from exaserve_ops.access.models import ApiKey, IdempotencyRecord, Scope
from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.lib.hints import ring

PREFIX_CHARACTERS = 11


@transaction.atomic
def create_api_key(
    *,
    user: AbstractBaseUser,
    name: str,
    scopes: Sequence[str],
    actor: str,
    now: datetime,
    expires_at: datetime | None = None,
) -> tuple[ApiKey, str]:
    """Make a key; the second value is its text, which cannot be had again.

    Raises `InvalidInputError` for an empty name or scopes that do not exist.
    """
    if not name.strip():
        raise InvalidInputError("name", "give the key a name that says who uses it")
    if not scopes or set(scopes) - set(Scope.values):
        raise InvalidInputError("scopes", f"choose from {', '.join(Scope.values)}")
    text = "xo-" + secrets.token_urlsafe(32)
    key = ApiKey.objects.create(
        name=name.strip(),
        user=user,
        prefix=text[:PREFIX_CHARACTERS],
        sha256=hash_key(text),
        scopes=sorted(set(scopes)),
        created_at=now,
        expires_at=expires_at,
    )
    record_event(subject_of(key), "created", actor=actor, now=now, reason=", ".join(key.scopes))
    ring("keys", key.pk)
    return key, text


@transaction.atomic
def revoke_api_key(key: ApiKey, *, actor: str, now: datetime) -> ApiKey:
    """Revoke a key, at once for REST and within seconds at every gateway. Twice is harmless."""
    locked = ApiKey.objects.select_for_update().get(pk=key.pk)
    if locked.revoked_at is None:
        locked.revoked_at = now
        locked.save(update_fields=["revoked_at"])
        record_event(subject_of(locked), "revoked", actor=actor, now=now)
        ring("keys", locked.pk)
    return locked


def delete_idempotency_records_before(moment: datetime) -> int:
    """Forget answers that no retry will ask for any more."""
    return IdempotencyRecord.objects.filter(created_at__lt=moment).delete()[0]


def subject_of(key: ApiKey) -> Subject:
    """Return the audit subject of a key."""
    return Subject("api_key", str(key.pk), str(key))
