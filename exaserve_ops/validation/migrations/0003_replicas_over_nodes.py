"""Validations of replicas that run on several nodes at once."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("validation", "0002_tuning"),
    ]

    operations = [
        migrations.AddField(
            model_name="validation",
            name="nodes_per_replica",
            field=models.PositiveSmallIntegerField(
                default=1,
                help_text="More than 1: each trial runs on so many nodes of one supernode at once.",
            ),
        ),
    ]
