"""Accelerators on which replicas hold the same weights once."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("inventory", "0008_node_mps")]

    operations = [
        migrations.AddField(
            model_name="accelerator",
            name="shares_memory",
            field=models.BooleanField(
                default=False,
                help_text="Replicas with the same weights hold them on it once; a CPU's do anyway.",
            ),
        ),
    ]
