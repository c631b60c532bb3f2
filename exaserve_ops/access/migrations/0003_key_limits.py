"""What a key may use at the gateway."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    """Three fields; keys that exist have no limits."""

    dependencies: ClassVar = [("access", "0002_keys_of_others")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="apikey",
            name="max_concurrent_requests",
            field=models.PositiveIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="apikey",
            name="tokens_per_minute",
            field=models.PositiveBigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="apikey",
            name="traffic_class",
            field=models.CharField(
                choices=[("interactive", "interactive"), ("batch", "batch")],
                default="interactive",
                max_length=16,
            ),
        ),
    ]
