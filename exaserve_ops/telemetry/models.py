"""Roll-ups of what live frames show and forget."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class ReplicaMinute(models.Model):
    """One replica's load over one minute. `None`: the engine did not say in that minute."""

    replica_id = models.UUIDField()
    minute = models.DateTimeField()
    kv_used_ratio_max = models.FloatField(null=True)
    requests_running_mean = models.FloatField(null=True)
    requests_waiting_max = models.PositiveIntegerField(null=True)
    generation_tokens_per_second_mean = models.FloatField(null=True)
    ttft_p95_seconds_max = models.FloatField(null=True)
    itl_p95_seconds_max = models.FloatField(null=True)
    prefix_hit_ratio_mean = models.FloatField(null=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["-minute"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["replica_id", "minute"], name="replica_minute_once"),
        ]
        indexes: ClassVar[list[models.Index]] = [models.Index(fields=["minute"], name="by_minute")]

    def __str__(self) -> str:
        """Return replica and minute."""
        return f"{self.replica_id} {self.minute:%Y-%m-%d %H:%M}"
