"""Nodes say which versions of engines they have that are no part of this product."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("inventory", "0009_accelerator_shares_memory")]

    operations = [
        migrations.AddField(
            model_name="node",
            name="engine_versions",
            field=models.JSONField(
                blank=True,
                default=dict,
                help_text="Of the engines that are no part of this product, by name.",
            ),
        ),
    ]
