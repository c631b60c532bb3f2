"""API keys and idempotency keys."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now

from exaserve_ops.access.domain.limits import INTERACTIVE, TRAFFIC_CLASSES, KeyLimits


class Scope(models.TextChoices):
    """What a key opens."""

    API = "api", "REST API, with the rights of its user"
    INFERENCE = "inference", "Inference through the gateway"


class ApiKey(models.Model):
    """A key is shown once, when it is made; only its SHA-256 is kept."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=100)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_keys")
    prefix = models.CharField(max_length=12, help_text="First characters, to tell keys apart.")
    sha256 = models.CharField(max_length=64, unique=True, editable=False)
    scopes = ArrayField(models.CharField(max_length=16, choices=Scope.choices))
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    max_concurrent_requests = models.PositiveIntegerField(null=True, blank=True)
    tokens_per_minute = models.PositiveBigIntegerField(null=True, blank=True)
    traffic_class = models.CharField(
        max_length=16, choices=[(name, name) for name in TRAFFIC_CLASSES], default=INTERACTIVE
    )

    class Meta:
        ordering: ClassVar[list[str]] = ["name"]
        verbose_name = "API key"
        permissions = [
            ("manage_keys_of_others", "Can list, make and revoke the API keys of other users"),
        ]

    def __str__(self) -> str:
        """Return the name and the prefix."""
        return f"{self.name} ({self.prefix}…)"

    @property
    def limits(self) -> KeyLimits:
        """What it may use at the gateway."""
        return KeyLimits(self.max_concurrent_requests, self.tokens_per_minute, self.traffic_class)


class IdempotencyRecord(models.Model):
    """The answer to a POST, so that the same request sent twice acts once."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    key = models.CharField(max_length=200)
    request_sha256 = models.CharField(max_length=64)
    response_status = models.PositiveSmallIntegerField()
    response_body = models.JSONField()
    created_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["user", "key"], name="idempotency_key_once_per_user"),
        ]

    def __str__(self) -> str:
        """Return the key."""
        return self.key
