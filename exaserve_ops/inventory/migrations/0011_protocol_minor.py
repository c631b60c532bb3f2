"""Nodes say which minor version of the protocol their agents speak."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("inventory", "0010_engine_versions")]

    operations = [
        migrations.AddField(
            model_name="node",
            name="protocol_minor",
            field=models.PositiveSmallIntegerField(
                default=0,
                help_text="Minor version of the protocol that its agent speaks; 0: it has not said.",
            ),
        ),
    ]
