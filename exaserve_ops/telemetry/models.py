"""Roll-ups of what live frames show and forget."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper


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


class RealField(models.FloatField):  # type: ignore[type-arg]  # Django's own is not generic
    """A float of 4 bytes: seven digits are more than any of these figures has."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str:  # noqa: ARG002 - Django's signature
        """Return the column's type."""
        return "real"


def _plain() -> RealField:
    return RealField(null=True)


def _of_cards() -> ArrayField:  # type: ignore[type-arg]  # as above
    return ArrayField(RealField(null=True), null=True)


class NodeMinute(models.Model):
    """One node's machine over one minute. `None`: nobody told in that minute.

    Columns as `domain.node_minutes` measures them; those of cards are lists in the order of `card_ordinals`,
    so that a node with eight of them costs one row and not nine.
    """

    node_id = models.UUIDField()
    minute = models.DateTimeField()
    ttft_p50_seconds = _plain()
    ttft_p99_seconds = _plain()
    requests_running = _plain()
    requests_waiting = _plain()
    cpu_used_ratio = _plain()
    cpu_busiest_ratio = _plain()
    cpu_stalled_ratio = _plain()
    memory_used_ratio = _plain()
    memory_stalled_ratio = _plain()
    network_used_ratio = _plain()
    network_receive_bytes_per_second = _plain()
    network_send_bytes_per_second = _plain()
    rdma_used_ratio = _plain()
    rdma_receive_bytes_per_second = _plain()
    rdma_send_bytes_per_second = _plain()
    disk_read_bytes_per_second = _plain()
    disk_write_bytes_per_second = _plain()
    io_stalled_ratio = _plain()
    card_ordinals = ArrayField(models.PositiveSmallIntegerField(), default=list, blank=True)
    card_used_ratio = _of_cards()
    card_memory_ratio = _of_cards()
    card_pcie_ratio = _of_cards()
    card_pcie_bytes_per_second = _of_cards()
    card_nvlink_ratio = _of_cards()
    card_nvlink_bytes_per_second = _of_cards()
    card_power_watts = _of_cards()
    card_temperature_celsius = _of_cards()
    card_held_back_ratio = _of_cards()

    class Meta:
        ordering: ClassVar[list[str]] = ["-minute"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["node_id", "minute"], name="node_minute_once"),
        ]
        indexes: ClassVar[list[models.Index]] = [models.Index(fields=["minute"], name="node_by_minute")]

    def __str__(self) -> str:
        """Return node and minute."""
        return f"{self.node_id} {self.minute:%Y-%m-%d %H:%M}"
