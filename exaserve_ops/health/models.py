"""Leases: the right of a node to speak for its replicas."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from exaserve_ops.inventory.models import Node


class NodeLease(models.Model):
    """The newest lease of a node. Reports of an older epoch are refused; agents refuse older commands."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, related_name="lease")
    epoch = models.BigIntegerField(default=1)
    boot_id = models.CharField(max_length=64)
    granted_at = models.DateTimeField()

    class Meta:
        ordering: ClassVar[list[str]] = ["node"]

    def __str__(self) -> str:
        """Return node and epoch."""
        return f"{self.node} epoch {self.epoch}"
