"""Making and revoking of API keys; remembering of answers; keeping of roles."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.apps import apps
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.management import create_permissions
from django.contrib.auth.models import Group, Permission
from django.db import connection, transaction

from exaserve_ops.access.domain.keys import hash_key
from exaserve_ops.access.domain.limits import KeyLimits
from exaserve_ops.access.domain.roles import FLEET_APPS, ROLES, permissions_of
from exaserve_ops.access.models import ApiKey, IdempotencyRecord, Scope
from exaserve_ops.audit.services import Subject, record_event
from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.lib.hints import ring

PREFIX_CHARACTERS = 11
NO_LIMITS = KeyLimits()


@transaction.atomic
def create_api_key(
    *,
    user: AbstractBaseUser,
    name: str,
    scopes: Sequence[str],
    actor: str,
    now: datetime,
    expires_at: datetime | None = None,
    limits: KeyLimits = NO_LIMITS,
) -> tuple[ApiKey, str]:
    """Make a key; the second value is its text, which cannot be had again.

    Raises `InvalidInputError` for an empty name, scopes that do not exist, or impossible limits.
    """
    if not name.strip():
        raise InvalidInputError("name", "give the key a name that says who uses it")
    if not scopes or set(scopes) - set(Scope.values):
        raise InvalidInputError("scopes", f"choose from {', '.join(Scope.values)}")
    _check_limits(limits)
    text = "xo-" + secrets.token_urlsafe(32)
    key = ApiKey.objects.create(
        name=name.strip(),
        user_id=user.pk,
        prefix=text[:PREFIX_CHARACTERS],
        sha256=hash_key(text),
        scopes=sorted(set(scopes)),
        created_at=now,
        expires_at=expires_at,
        **dataclasses.asdict(limits),
    )
    reason = ", ".join(key.scopes) + ("" if limits == NO_LIMITS else f"; {limits.sentence()}")
    record_event(subject_of(key), "created", actor=actor, now=now, reason=reason)
    ring("keys", key.pk)
    return key, text


@transaction.atomic
def change_key_limits(key: ApiKey, limits: KeyLimits, *, actor: str, reason: str, now: datetime) -> ApiKey:
    """Change what a key may use, within seconds at every gateway. The same limits again: no event.

    Raises `InvalidInputError` for impossible limits.
    """
    _check_limits(limits)
    locked = ApiKey.objects.select_for_update().get(pk=key.pk)
    if locked.limits != limits:
        said = f"{locked.limits.sentence()} → {limits.sentence()}"
        for name, value in dataclasses.asdict(limits).items():
            setattr(locked, name, value)
        locked.save(update_fields=list(dataclasses.asdict(limits)))
        why = f"{said}: {reason}" if reason else said
        record_event(subject_of(locked), "limits_changed", actor=actor, now=now, reason=why)
        ring("keys", locked.pk)
    return locked


def _check_limits(limits: KeyLimits) -> None:
    if (problem := limits.problem()) is not None:
        raise InvalidInputError(*problem)


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


def lock_idempotency_key(user: AbstractBaseUser, key: str) -> None:
    """Wait until nobody else acts on this key; held until the transaction ends."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"{user.pk}:{key}"])


def remember_answer(
    *,
    user: AbstractBaseUser,
    key: str,
    request_sha256: str,
    status: int,
    body: Any,  # noqa: ANN401 - whatever JSON the answer was
    now: datetime,
) -> IdempotencyRecord:
    """Keep the answer to a POST for whoever sends it again."""
    return IdempotencyRecord.objects.create(
        user_id=user.pk,
        key=key,
        request_sha256=request_sha256,
        response_status=status,
        response_body=body,
        created_at=now,
    )


@transaction.atomic
def seed_roles() -> None:
    """Make the groups of the product have exactly the permissions of their roles. Twice is harmless."""
    for config in apps.get_app_configs():
        if config.label in FLEET_APPS or config.label == "auth":
            # Django makes an app's permissions in its own `post_migrate`, which may come after ours.
            create_permissions(config, verbosity=0)
    rows = Permission.objects.select_related("content_type")
    existing = {f"{row.content_type.app_label}.{row.codename}": row for row in rows}
    for role in ROLES:
        group, _ = Group.objects.get_or_create(name=role.name)
        group.permissions.set(existing[name] for name in permissions_of(role.name, existing))


def delete_idempotency_records_before(moment: datetime) -> int:
    """Forget answers that no retry will ask for any more."""
    return IdempotencyRecord.objects.filter(created_at__lt=moment).delete()[0]


def subject_of(key: ApiKey) -> Subject:
    """Return the audit subject of a key."""
    return Subject("api_key", str(key.pk), str(key))
