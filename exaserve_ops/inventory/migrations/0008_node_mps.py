"""Nodes say whether replicas can have MPS shares of their cards."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("inventory", "0007_end_process_permission")]

    operations = [
        migrations.AddField(
            model_name="node",
            name="mps_ready",
            field=models.BooleanField(
                default=False, help_text="An MPS control daemon answers: replicas can have shares of cards."
            ),
        ),
        migrations.AddField(
            model_name="node",
            name="mps_note",
            field=models.CharField(
                blank=True, default="", help_text="What keeps MPS from being used.", max_length=500
            ),
            preserve_default=False,
        ),
    ]
