"""The latest turns of a conversation and its stays at replicas."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    """Two bounded lists beside the sums."""

    dependencies: ClassVar = [("inference_sessions", "0001_initial")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="inferencesession",
            name="latest_turns",
            field=models.JSONField(blank=True, default=list),
        ),
        migrations.AddField(
            model_name="inferencesession", name="stays", field=models.JSONField(blank=True, default=list)
        ),
    ]
